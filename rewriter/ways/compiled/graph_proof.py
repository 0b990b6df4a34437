"""A planned graph of Dynamo's, held against the same graph as Dynamo made it: all that a backend ever sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.backend import generator_states
from profiler.tracing.fake_tensors.patches import generator_states_of_all, restore_generators
from profiler.tracing.joint import without_hooks
from rewriter.proof import VerificationError, same_bits
from rewriter.ways.compiled.dynamo_graph import DynamoGraph
from rewriter.ways.compiled.planned_route import Piece

Seen = dict[str, Tensor | None]


def prove_graph(graph: DynamoGraph, piece: Piece, args: Sequence[Any]) -> None:
    """VerificationError where outputs, gradients, what it writes to or generators differ; everything is put back."""
    trial = _Trial(piece, args)
    expected = trial.run(lambda given: _distinct(graph.module(*given)))
    actual = trial.run(lambda given: piece.run(given, lambda _: None, held_bytes=0)[1])
    for name, tensor in expected.items():
        if not _equal(tensor, actual[name]):
            raise VerificationError(
                f"graph {graph.index} of Dynamo's, planned, differs from the same graph as Dynamo made it, first in "
                f'{name}. Nothing was changed; options={{"budget": ..., "prove": False}} goes on regardless'
            )


class _Trial:
    """Forward and backward of one call, on inputs of their own."""

    def __init__(self, piece: Piece, args: Sequence[Any]) -> None:
        self.ends = piece.own.ends
        self.args = args

    def run(self, call: Callable[[list[Any]], list[Tensor]]) -> Seen:
        states = generator_states_of_all()
        leaves = [self._leaf(arg) for arg in self.args]
        # What something has computed may be written to, which a leaf may not.
        given = [leaf.clone() if _is_computed(arg) else leaf for arg, leaf in zip(self.args, leaves, strict=True)]
        tensors = call(given)
        wanted = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
        used = [tensors[i] for i in self.ends.used]
        with without_hooks(list(wanted.values())):
            gradients = torch.autograd.grad(used, list(wanted.values()), self._tangents(used), allow_unused=True)
        seen: Seen = {f"output {i}": tensor.detach() for i, tensor in enumerate(tensors)}
        seen |= {f"the gradient of input {i}": g for i, g in zip(wanted, gradients, strict=True)}
        seen |= {
            f"input {i}, which it may write to": one.detach() for i, one in enumerate(given) if isinstance(one, Tensor)
        }
        seen |= {f"generator {i}": state for i, state in enumerate(_states())}
        restore_generators(states)
        return seen

    @staticmethod
    def _leaf(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        # A parameter is read, and anything else may be written to.
        return arg.detach().requires_grad_() if arg.requires_grad else arg.detach().clone()

    def _tangents(self, used: Sequence[Tensor]) -> list[Tensor]:
        generator, tangents = torch.Generator().manual_seed(0), list[Tensor]()
        for output, layout in zip(used, self.ends.layouts, strict=True):
            drawn = torch.randn(output.shape, generator=generator).to(output.dtype).to(output.device)
            tangents.append(drawn if layout.repeated else layout.empty(output).copy_(drawn))
        return tangents


def _is_computed(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.requires_grad and not arg.is_leaf


def _states() -> list[Tensor]:
    """The states of the devices' generators."""
    return [torch.get_rng_state(), *(state for states in generator_states().values() for state in states)]


def _distinct(returned: Any) -> list[Tensor]:
    return list({id(one): one for one in returned if isinstance(one, Tensor)}.values())


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else same_bits(a, b)
