"""A planned model's forward and backward on the autograd tape: gradients leave it in stages, as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from profiler.ops import memory_of
from profiler.tracing.fake_tensors.patches import below_autograd
from profiler.tracing.fx_graphs.layouts import Layout, laid_out
from profiler.tracing.ranks.torch_distributed import distributed, spec_of
from rewriter.ways import company
from rewriter.ways.own_capture.cutting import Halves
from rewriter.ways.rehearsal import BackwardError, is_graph_kept, refuse_second_derivative


class Passage:
    """One forward of a planned model, and what its backward needs."""

    def __init__(
        self,
        halves: Halves,
        inputs: list[Any],
        *,
        names: Sequence[int],
        trainable: Sequence[int],
        used: Sequence[int],
        layouts: Sequence[Layout],
        held_bytes: int,
        watched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.halves = halves
        self.watched = watched  # a collective of the backward that fails says so in a sentence
        self.held_bytes = held_bytes  # from the forward on until its backward
        self.layouts = layouts  # how the plan expects the gradients of `used` to lie in memory
        self.names = names  # of the outputs, for people
        self.inputs = inputs
        self.trainable = frozenset(trainable)
        self.used = tuple(used)
        self.others: list[Any] = []  # what is saved and no tensor
        self.places: list[bool] = []  # which entries of what is saved are tensors
        self.specs: list[Any] = []  # of each tensor that gets a gradient: how its parts lie on several processes
        self.carried: list[Any] = []  # between stages of the backward
        self.is_open = True  # until a backward has come and taken what was saved
        self.saved_memory: set[int] = set()
        self.memory: set[int] = set()  # of what is saved and returned: the storages
        self.unsaved: frozenset[int] = frozenset()  # returned, and not kept for the backward by the plan itself
        self.on_backward: Callable[[dict[int, Layout]], None] = lambda _: (
            None
        )  # told which outputs get gradients, and how

    def through(self, wanted: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the forward returns; on the tape, `wanted` get their gradients stage by stage."""
        token: Tensor | None = None
        stages = self.halves.stages
        self.specs = [spec_of(tensor) for tensor in wanted]
        for i in reversed(range(len(stages))):
            token = _Handover.apply(self, i, token, *(wanted[k] for k in stages[i].gradients))  # type: ignore[no-untyped-call]
        returned: tuple[Any, ...] = _Forward.apply(self, token)  # type: ignore[no-untyped-call]
        company.begin(self, held_bytes=self.held_bytes, memory=self.memory)
        return returned

    def forward(self) -> tuple[list[Any], list[Any]]:
        """Run the forward; what it returns, and all that the backward reads of it."""
        inputs, self.inputs = self.inputs, []
        with below_autograd():
            returned, saved = self.halves.forward(*inputs)
            returned = _each_its_own(returned, taken={id(entry) for entry in inputs})
        kept = {memory_of(entry)._cdata for entry in saved if isinstance(entry, Tensor)}
        lying = [memory_of(tensor)._cdata for tensor in returned]
        self.unsaved = frozenset(i for i, memory in enumerate(lying) if memory not in kept)
        self.saved_memory, self.memory = kept, kept.union(lying)
        return returned, [*saved, *(inputs[i] for i in self.halves.saved_inputs)]

    def split(self, saved: list[Any]) -> list[Tensor]:
        """The tensors of what is saved: they belong on the tape, which minds that nobody writes to them."""
        self.places = [isinstance(entry, Tensor) for entry in saved]
        self.others = [entry for entry in saved if not isinstance(entry, Tensor)]
        return [entry for entry in saved if isinstance(entry, Tensor)]

    def joined(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The inverse of `split`."""
        sources = {True: iter(tensors), False: iter(self.others)}
        return [next(sources[place]) for place in self.places]

    def backward(self, stage: int) -> list[Any]:
        """Run one stage; the gradients that it completes."""
        carried, self.carried = self.carried, []
        of_stage = self.halves.stages[stage]
        with self.watched(), below_autograd():
            gradients, self.carried = of_stage.run(carried)
        specs = [self.specs[k] for k in of_stage.gradients]
        return [g if g is None else distributed(_alone(g), spec) for g, spec in zip(gradients, specs, strict=True)]

    def laid_out(self, tangents: Sequence[Any]) -> list[Tensor]:
        """The gradients of the used outputs, lying in memory as the plan expects them."""
        return [laid_out(tangents[i], layout) for i, layout in zip(self.used, self.layouts, strict=True)]

    def check(self, tangents: Sequence[Any]) -> None:
        """BackwardError for a second derivative, and where other outputs get a gradient than the plan was made for."""
        refuse_second_derivative()
        seen = tuple(i for i, tangent in enumerate(tangents) if tangent is not None and i in self.trainable)
        self.on_backward({self.names[i]: Layout.of(tangents[i]) for i in seen})
        if seen != self.used:
            asked, planned = ([self.names[i] for i in indices] for indices in (seen, self.used))
            raise BackwardError(
                f"gradients came back for outputs {asked} of the model, and it was planned for {planned} "
                "(counted among the tensors that it returns). No gradient was given to anything, and the next forward "
                "is planned for what was seen now: run this batch again. Its forward has been, though: batch norm "
                "statistics and random generators have moved on, and will do so once more. Where both will come, let "
                "an argument of the model say which (`model(x, task='left')`): each is planned for then"
            )


def _alone(gradient: Tensor) -> Tensor:
    """The same without what it is a view of: the engine adds a further part in place only where nobody else is held."""
    return gradient.detach() if gradient._is_view() else gradient


def _each_its_own(returned: Sequence[Any], *, taken: set[int]) -> list[Any]:
    """The same tensors, none of them twice and none of the caller's: each gets a place of its own on the tape."""
    own: list[Any] = []
    for tensor in returned:
        own.append(tensor.detach() if id(tensor) in taken else tensor)
        taken.add(id(tensor))
    return own


class _Forward(torch.autograd.Function):
    """The forward; its backward only takes the tangents over, which autograd would hold on to while it runs."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, token: Tensor) -> Any:
        returned, saved = passage.forward()
        ctx.passage = passage
        ctx.save_for_backward(*passage.split(saved))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(returned) if isinstance(t, Tensor) and i not in passage.trainable)
        )
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        passage: Passage = ctx.passage
        if not is_graph_kept():
            passage.is_open = False
            company.end(passage)
        passage.check(tangents)
        passage.carried = [*passage.joined(ctx.saved_tensors), *passage.laid_out(tangents)]
        ctx.maybe_clear_saved_tensors()  # they are the stages' now, to let go of; unless the graph is retained
        return None, None


class _Handover(torch.autograd.Function):
    """A stage of the backward: its token leads from the stage before, and costs nothing."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, stage: int, token: Tensor | None, *wanted: Tensor) -> Tensor:
        ctx.passage, ctx.stage = passage, stage
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> Any:
        return None, None, None, *ctx.passage.backward(ctx.stage)
