"""A model's forward and backward as one step, with what the caller does between them as a single op.

`outside(outputs) -> tangents` stands for the loss: an op that runs once and that nothing can be moved across. With it
the two passes are one closed graph, so that capture, measuring, planning and replay are those of any other step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.ir import Graph, Op, Phase, Role
from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.gradient_sums import mark_sums, parts_noted
from profiler.tracing.ranks.torch_distributed import local
from profiler.tracing.ranks.torch_shards import forward_with_gathers
from profiler.workload import Workload


@torch.library.custom_op("recompute_planner::outside", mutates_args=())
def outside(used: list[Tensor], others: list[Tensor], strides: list[int]) -> list[Tensor]:
    """What comes back for the used outputs of a forward, `strides` one after the other; where nobody computes a loss,
    ones."""
    return [like.new_ones(_extent(like)).as_strided(like.shape, like.stride()) for like in _tangents(used, strides)]


@outside.register_fake
def _outside_without_memory(used: list[Tensor], others: list[Tensor], strides: list[int]) -> list[Tensor]:
    return _tangents(used, strides)


def _tangents(used: list[Tensor], strides: list[int]) -> list[Tensor]:
    rest, found = list(strides), list[Tensor]()
    for output in used:
        own, rest = rest[: output.dim()], rest[output.dim() :]
        found.append(output.new_empty_strided(output.shape, own))
    return found


def _extent(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


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
    """Deep copies made inside have a mark in place of each tensor.

    A parameter copies itself without asking any mode, so `mark` takes the place of its method.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        return self.mark(args[0])

    def mark(self, tensor: Tensor, _: Any = None) -> _Mark:
        """What stands for a tensor, each time the same."""
        self.tensors.setdefault(id(tensor), tensor)
        return _Mark(list(self.tensors).index(id(tensor)))


@dataclass(frozen=True, slots=True)
class Template:
    """What a model returns, whatever object that is, with marks where its tensors go."""

    form: Any

    @staticmethod
    def of(returned: Any) -> tuple[Template, list[Tensor]]:
        """The template of a returned object, and its tensors, each once; CaptureError where it cannot be copied."""
        marking = _Marking()
        own_copy = lambda parameter, memo: marking.mark(parameter)  # noqa: E731 - a function, so that it is a method
        with marking, patched([(nn.Parameter, "__deepcopy__", own_copy)]):
            try:
                form = copy.deepcopy(returned)
            except Exception as error:
                raise CaptureError(
                    f"the model returns something that cannot be made anew with other tensors in it, of type "
                    f"{type(returned).__name__} ({error}): return tensors in lists, dicts or records"
                ) from error
        return Template(form), list(marking.tensors.values())

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The object anew, with other tensors."""
        memo: dict[Any, Any] = {_Mark: tensors}
        return copy.deepcopy(self.form, memo)


# -- the step ---------------------------------------------------------------------------------------------------


class ForwardAndBackward:
    """A train step without an optimizer: the model's forward, `outside`, and the gradients of what is differentiable.

    It returns the tensors that the model computed and returns, then a gradient (or None) for each of `wanted`. Tensors
    are known by their positions among all that the model returns; those that it was given itself are only `passed_on`.
    `used` says which of the differentiable ones get a gradient from the caller (None: the scalars among them, or all),
    `layouts` how those lie in memory, where it is not like the tensors that they are for.
    """

    def __init__(self, *, used: frozenset[int] | None, layouts: Mapping[int, Layout]) -> None:
        self._used = used
        self._layouts = layouts
        self.template: Template | None = None  # of the last call, like all that follows
        self.passed_on: Mapping[int, int] = {}
        self.computed: tuple[int, ...] = ()
        self.trainable: tuple[int, ...] = ()
        self.used: tuple[int, ...] = ()
        self.layouts: tuple[Layout, ...] = ()  # of the gradients that come for `used`

    def __call__(self, model: nn.Module, _: Any, batch: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        args, kwargs = batch
        there = given(model, batch)
        self.template, tensors = Template.of(forward_of(model, args, kwargs))
        self.passed_on = passed_on(tensors, there)
        self.computed = tuple(i for i in range(len(tensors)) if i not in self.passed_on)
        self.trainable = tuple(i for i in self.computed if tensors[i].requires_grad)
        used = _losses(self.trainable, tensors) if self._used is None else self._used
        self.used = tuple(i for i in self.trainable if i in used)
        if not self.used:
            raise CaptureError("the model returns no tensor that a loss could be differentiated through")
        outputs = {i: tensors[i].detach() for i in self.computed}
        others = [output for i, output in outputs.items() if i not in self.used]
        lying = {i: self._layouts.get(i) or Layout.of(outputs[i]) for i in self.used}
        self.layouts = tuple(lying.values())
        strides = [stride for i, layout in lying.items() for stride in layout.strides(tuple(outputs[i].shape))]
        tangents = outside([outputs[i] for i in self.used], others, strides)
        differentiated = [tensors[i] for i in self.used]
        asked = wanted(model, batch)
        with without_hooks(asked), parts_noted(differentiated, asked) as parts:
            gradients = torch.autograd.grad(differentiated, asked, tangents, allow_unused=True)
        mark_sums(parts, gradients)
        return list(outputs.values()), list(map(local, gradients))


def _losses(trainable: tuple[int, ...], tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """What a caller of whom nothing is known goes backward from: scalars, if there are any."""
    return tuple(i for i in trainable if tensors[i].dim() == 0) or trainable


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, hooks on the gradients of these tensors are silent: they are the caller's, who runs them himself."""
    hooked = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooked:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks


def given(model: nn.Module, batch: Any) -> list[Tensor]:
    """Every tensor that a forward starts from: parameters, buffers, tensors that it is called with."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *leaves]


def passed_on(tensors: Sequence[Tensor], there: Sequence[Tensor]) -> dict[int, int]:
    """Which of the returned tensors are the very ones that were there before: by position, and where they were."""
    place = {id(tensor): i for i, tensor in reversed(list(enumerate(there)))}
    return {i: place[id(tensor)] for i, tensor in enumerate(tensors) if id(tensor) in place}


def forward_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's own forward, without the hooks that are on the model itself."""
    return forward_with_gathers(model, args, kwargs)


@contextmanager
def in_place_of_forward(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, the next call of the model's forward is one of `forward`, for whom the model's own is there again."""
    own = vars(model).get("forward")

    def put_back() -> None:
        if own is None:
            vars(model).pop("forward", None)
        else:
            vars(model)["forward"] = own

    def once(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return forward(*args, **kwargs)

    vars(model)["forward"] = once
    try:
        yield
    finally:
        put_back()


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """Inside, nobody is told what autograd saves: torch.utils.checkpoint around a model would count what is tried."""
    autograd, hooks = torch._C._autograd, list[Any]()
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def in_backward() -> bool:
    """Whether autograd is going backward here, as in a recomputation."""
    return torch._C._current_graph_task_id() != -1


def is_transformed(batch: Any) -> bool:
    """Whether a call is one of torch.func's, or one that is traced: what it computes is not what its tensors hold."""
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.compiler.is_compiling():
        return True
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(batch))


def as_it_was(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model, its hooks included, past whatever was put in the place of its call."""
    return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def wanted(model: nn.Module, batch: Any) -> list[Tensor]:
    """What gets a gradient: the model's parameters, then tensors that it is called with."""
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [tensor for tensor in (*model.parameters(), *given) if tensor.requires_grad]


def is_trained(model: nn.Module, batch: Any) -> bool:
    """Whether anything gets a gradient: `wanted` without making the list, and without names."""
    if any(p.requires_grad for p in parameters_of(model)):
        return True
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(batch))


def parameters_of(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters in no order, tied ones perhaps twice: a few times faster than by their names."""
    seen, rest = set[int](), [model]
    while rest:
        module = rest.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
        rest += [child for child in module._modules.values() if child is not None]


def joint_workload(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    used: frozenset[int] | None,
    layouts: Mapping[int, Layout],
) -> Workload:
    """Forward and backward of a call as a workload; its batch is `(args, kwargs)`, cut off from the caller's graph."""
    return Workload(ForwardAndBackward(used=used, layouts=layouts), model, None, detached((args, kwargs)))


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
