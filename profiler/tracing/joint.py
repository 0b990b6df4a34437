"""A model's forward and backward as one step, with what the caller does between them as a single op.

`outside(outputs) -> tangents` stands for the loss: an op that runs once and that nothing can be moved across. With it
the two passes are one closed graph, so that capture, measuring, planning and replay are those of any other step.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.ir import Graph, Op, Phase, Role
from profiler.errors import CaptureError
from profiler.workload import Workload


@torch.library.custom_op("recompute_planner::outside", mutates_args=())
def outside(used: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """What comes back for the used outputs of a forward; where nobody computes a loss, ones."""
    return [torch.ones_like(output) for output in used]


@outside.register_fake
def _outside_without_memory(used: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(output) for output in used]


OUTSIDE = torch.ops.recompute_planner.outside.default
OUTSIDE_NAME = "recompute_planner.outside.default"


# -- what a model returns ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mark:
    """Stands for a tensor in a template."""

    index: int

    def __deepcopy__(self, memo: dict[Any, Any]) -> Tensor:
        tensor: Tensor = memo[_Mark][self.index]
        return tensor


class _Marking(TorchFunctionMode):
    """Deep copies made inside have a mark in place of each tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        self.tensors.setdefault(id(tensor), tensor)
        return _Mark(list(self.tensors).index(id(tensor)))


@dataclass(frozen=True, slots=True)
class Template:
    """What a model returns, whatever object that is, with marks where its tensors go."""

    form: Any

    @staticmethod
    def of(returned: Any) -> tuple[Template, list[Tensor]]:
        """The template of a returned object, and its tensors, each once."""
        with _Marking() as marking:
            form = copy.deepcopy(returned)
        return Template(form), list(marking.tensors.values())

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The object anew, with other tensors."""
        memo: dict[Any, Any] = {_Mark: tensors}
        return copy.deepcopy(self.form, memo)


# -- the step ---------------------------------------------------------------------------------------------------


class ForwardAndBackward:
    """A train step without an optimizer: the model's forward, `outside`, and the gradients of what is differentiable.

    It returns all tensors of what the model returns, then a gradient (or None) for each of `wanted`. `used` says which
    of the differentiable tensors get a gradient from the caller, by their positions; None: all of them.
    """

    def __init__(self, *, used: frozenset[int] | None) -> None:
        self._used = used
        self.template: Template | None = None  # of the last call
        self.trainable: tuple[int, ...] = ()
        self.used: tuple[int, ...] = ()

    def __call__(self, model: nn.Module, _: Any, batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        args, kwargs = batch
        self.template, tensors = Template.of(as_it_was(model, args, kwargs))
        self.trainable = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        self.used = tuple(i for i in self.trainable if self._used is None or i in self._used)
        if not self.used:
            raise CaptureError("the model returns no tensor that a loss could be differentiated through")
        outputs = [tensor.detach() for tensor in tensors]
        others = [output for i, output in enumerate(outputs) if i not in self.used]
        tangents = outside([outputs[i] for i in self.used], others)
        differentiated = [tensors[i] for i in self.used]
        return outputs, list(torch.autograd.grad(differentiated, wanted(model, batch), tangents, allow_unused=True))


def as_it_was(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model, its hooks included, past whatever was put in the place of its call."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def wanted(model: nn.Module, batch: Any) -> list[Tensor]:
    """What gets a gradient: the model's parameters, then tensors that it is called with."""
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [tensor for tensor in (*model.parameters(), *given) if tensor.requires_grad]


def joint_workload(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, used: frozenset[int] | None
) -> Workload:
    """Forward and backward of a call as a workload; its batch is `(args, kwargs)`, cut off from the caller's graph."""
    return Workload(ForwardAndBackward(used=used), model, None, detached((args, kwargs)))


def detached(batch: Any) -> Any:
    """The same tensors as leaves: what made them is the caller's, and so is its backward."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), batch)


def kept_for_another_backward(graph: Graph) -> Graph:
    """The graph without in-place forms that write over what the forward leaves to its caller or its backward.

    A caller may go backward twice (`retain_graph=True`): what was saved has to be there again.
    """
    left = {graph.values[v].storage for v in graph.outputs}
    left |= {s for op in graph.ops if op.phase is Phase.BACKWARD for s in graph.reads[op.id]}
    made_before = {s for s in left if _made_before(graph, s)}

    def kept(op: Op) -> Op:
        fresh = tuple(v for v in op.overwritable if graph.values[v].storage not in made_before)
        return op if fresh == op.overwritable else replace(op, overwritable=fresh)

    return replace(graph, ops=tuple(kept(op) for op in graph.ops)).validate()


def _made_before(graph: Graph, storage: int) -> bool:
    made = graph.maker[storage]
    return made is None or graph.ops[made].phase is Phase.FORWARD


def with_facts(graph: Graph, *, let_go: Collection[int], outside_bytes: int, gradients_leave: bool) -> Graph:
    """The graph as the caller runs it.

    `let_go` are values that the caller does not hold when the backward begins; `outside_bytes` is what it allocates
    between the two passes. Where `gradients_leave`, they are added to what parameters have already, and freed.
    """
    turn = next(op.id for op in graph.ops if op.target == OUTSIDE_NAME)
    tangent_bytes = sum(graph.storages[s].nbytes for s in graph.makes[turn])
    ops = list(graph.ops)
    ops[turn] = replace(ops[turn], workspace_bytes=max(0, outside_bytes - tangent_bytes))
    leaving = {v for v in graph.outputs if gradients_leave and _is_gradient(graph, v)}
    outputs = tuple(v for v in graph.outputs if v not in let_go and v not in leaving)
    return replace(graph, ops=tuple(ops), outputs=outputs).validate()


def _is_gradient(graph: Graph, value: int) -> bool:
    return graph.storages[graph.values[value].storage].role is Role.GRADIENT
