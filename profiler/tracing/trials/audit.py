"""A captured step held against what eager does: op by op against one eager step, and against a second trace."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.collectives import COMMUNICATION
from profiler.errors import CaptureError, is_machinery
from profiler.ops import aten
from profiler.tracing.eager_ways.metrics import Callee, taken_calls, untaken
from profiler.tracing.fake_tensors.patches import threads_of_this
from profiler.tracing.fx_graphs.provenance import META
from profiler.tracing.guards import Change, exactly_equal
from profiler.tracing.trials.own_changes import WAYS_OUT

# Bookkeeping that differs between a trace and a run, and never in what is computed: aliases, values read back, and the
# copies that autograd makes of a gradient depending on who else holds it.
_BOOKKEEPING = frozenset(
    {
        aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten._local_scalar_dense.default, aten.is_nonzero.default, aten.clone.default, aten.copy_.default,
        aten.new_empty_strided.default, aten.empty_like.default, aten.empty_strided.default,
        aten.empty.memory_format, aten.zeros_like.default, aten.new_zeros.default, aten.new_empty.default,
        aten.set_.source_Storage, aten.set_.source_Storage_storage_offset,  # a copy of a real tensor, by `deepcopy`
        # After an in-place op on a view, autograd goes back through what made the view, or through its strides.
        aten.select_backward.default, aten.slice_backward.default, aten.diagonal_backward.default,
        aten.as_strided_scatter.default, aten.select_scatter.default, aten.slice_scatter.default,
    }
)  # fmt: skip


# What holds the same values as one of its arguments, and the position of that.
_COPIES = {
    aten.detach.default: 0, aten.alias.default: 0, aten.lift_fresh.default: 0, aten.lift_fresh_copy.default: 0,
    aten.clone.default: 0, aten.copy_.default: 1,
}  # fmt: skip
_LONGEST = 200  # letters of a node's name


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSeen:
    """One op as it ran or was traced, with the line that it comes from.

    `takes` are its arguments, traced ones by the positions of their ops; "" where it ran.
    """

    name: str
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    takes: str
    line: str
    is_view: bool  # computes nothing, as `_unsafe_view` does, too
    communicates: bool = False  # stands for what a wrapper of the model does in hooks of its own

    @property
    def kind(self) -> tuple[Any, ...]:
        """What a run and a trace of the same op have in common."""
        # Only the first result: what fake tensors say of further ones (a batch norm's statistics) is not always so.
        return self.name, self.results[:1]

    @property
    def whole(self) -> tuple[Any, ...]:
        """What two traces of the same op have in common."""
        return self.name, self.results, self.takes

    def __str__(self) -> str:
        made = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self.results)
        return f"{self.name} -> {made or 'nothing'}{f' at {self.line}' if self.line else ''}"


def _counts(op: Any) -> bool:
    return isinstance(op, OpOverload) and op.namespace == "aten" and op not in _BOOKKEEPING


def _is_view(op: OpOverload) -> bool:
    return bool(op.is_view) or op is aten._unsafe_view.default


def _results(op: OpOverload, made: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shapes and types of what an op made; nothing of one that leaves out some, which fake tensors do not always."""
    if any(argument.name == "output_mask" for argument in op._schema.arguments):
        return ()
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def ops_of(graph: fx.Graph) -> tuple[OpSeen, ...]:
    """The ops of a graph as it came from the tracer."""
    names = _names_of(graph)
    return tuple(
        OpSeen(
            name=str(node.target),
            results=_results(node.target, node.meta.get("val")),
            takes=repr(fx.node.map_arg((node.args, node.kwargs), names.__getitem__)),
            line=_line_of(node),
            is_view=_is_view(node.target),
            communicates=COMMUNICATION in node.meta,
        )
        for node in graph.nodes
        if node.op == "call_function" and _counts(node.target)
    )


def names_of_outputs(graph: fx.Graph) -> tuple[str, ...]:
    """What two traces of the same step have in common of each output."""
    (output,) = graph.find_nodes(op="output")
    names = _names_of(graph)
    return tuple(names.get(node, "") if isinstance(node, fx.Node) else repr(node) for node in output.args[0])


def _names_of(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every node that hangs on nothing but those that count: bookkeeping may be more or less."""
    names: dict[fx.Node, str] = {}
    counts = {True: 0, False: 0}
    for node in graph.nodes:
        counted = node.op == "call_function" and _counts(node.target)
        if counted or node.op != "call_function":
            names[node] = f"%{counts[counted]}" if counted else f"{node.op} {counts[counted]}"
            counts[counted] += 1
        elif node.target in _COPIES:
            names[node] = names[node.args[_COPIES[node.target]]]
        elif node.target is operator.getitem:
            names[node] = f"{names[node.args[0]]}[{_result(*node.args)}]"
        else:
            args = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            names[node] = f"{getattr(node.target, '__name__', node.target)}{args!r}"[:_LONGEST]
    return names


def _result(made: fx.Node, index: int) -> int:
    """Which result of an op this is; the gradients of a recurrent layer's two biases are one."""
    return 3 if made.target is aten.mkldnn_rnn_layer_backward.default and index == 4 else index


def _line_of(node: fx.Node) -> str:
    origin = node.meta.get(META)
    return "" if origin is None else str(origin.source_line)


# -- eager --------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every op that reaches the dispatcher, with the line of the user's or of a library that it comes from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[OpSeen] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() and _is_composite(func):  # else they come as what they are made of
            with self:
                return func.decompose(*args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        if not self.paused and _counts(func):
            line = _line(sys._getframe(1))
            self.seen.append(
                OpSeen(name=str(func), results=_results(func, made), takes="", line=line, is_view=_is_view(func))
            )
        return made


def _is_composite(op: Any) -> bool:
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    keys = torch._C.DispatchKey
    return op.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not op.has_kernel_for_dispatch_key(
        keys.CPU
    )


def _line(frame: FrameType | None) -> str:
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def eager_ops(run: Callable[[], Any], *, with_optimizer: bool, metrics: Sequence[Callee] = ()) -> tuple[OpSeen, ...]:
    """What one eager step runs; without the ops of an optimizer that stays outside of the graph, and of `metrics`."""
    recorder = _Recorder()
    with recorder, _paused_in_steps(recorder, unless=with_optimizer), _paused_in_metrics(recorder, metrics):
        run()
    return tuple(recorder.seen)


@contextmanager
def _paused_in_metrics(recorder: _Recorder, metrics: Sequence[Callee]) -> Iterator[None]:
    keys = {callee.key for callee in metrics}

    def take(callee: Callee, args: Any, kwargs: Any) -> Any:
        if callee.key not in keys and not callee.has_state:
            return callee.run(*args, **kwargs)  # those that it calls may be among them
        was, recorder.paused = recorder.paused, recorder.paused or callee.key in keys
        try:
            with untaken():
                return callee.run(*args, **kwargs)
        finally:
            recorder.paused = was

    with taken_calls(take) if metrics else nullcontext():
        yield


@contextmanager
def _paused_in_steps(recorder: _Recorder, *, unless: bool) -> Iterator[None]:
    depth = 0  # an optimizer may step another one inside of its step
    mine = threads_of_this()

    def enter(*_: Any) -> None:
        nonlocal depth
        if not mine():
            return
        depth += 1
        recorder.paused = not unless

    def leave(*_: Any) -> None:
        nonlocal depth
        if not mine():
            return
        depth -= 1
        recorder.paused = depth > 0 and not unless

    handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- comparing ----------------------------------------------------------------------------------------------------


def check_against_eager(captured: Sequence[OpSeen], eager: Sequence[OpSeen]) -> None:
    """CaptureError where the captured step is not the eager one, with the first op in which they differ.

    Views are left out: after an in-place op on one (`ReLU(inplace=True)` behind a linear layer on tokens), autograd
    makes it anew, which a trace sees and a run does not.
    """
    captured, eager = ([op for op in seen if not (op.is_view or op.communicates)] for seen in (captured, eager))
    where = first_difference([op.kind for op in captured], [op.kind for op in eager])
    if where is None:
        return
    ours, theirs = (_told(seen, where) for seen in (captured, eager))
    raise CaptureError(
        f"the captured step is not what your step does when it runs: op {where + 1} is {ours} in the capture, and "
        f"{theirs} when the step runs. Code that asks whether it is traced, compiled or given fake tensors takes "
        "another path there: look for a setting of that library that decides it, or plan a part of the model that does "
        "not contain it, checkpoint_model(part, budget=...)"
    )


def check_second_trace(
    first: Sequence[OpSeen], second: Sequence[OpSeen], changes: Sequence[Change], returned: tuple[Any, Any] = ((), ())
) -> None:
    """CaptureError where a step does something else the second time, with the objects that it changed itself.

    `returned` are the plain values that it returned the first and the second time.
    """
    where = first_difference([op.whole for op in first], [op.whole for op in second])
    if where is not None:
        once, again = (_told(seen, where, arguments=True) for seen in (first, second))
        raise _another_each_time(f"op {where + 1} was {once}, and the second time {again}", changes)
    other = first_difference(*([Exactly(leaf) for leaf in leaves] for leaves in returned))
    if other is not None:
        once, again = (repr(leaves[other]) if other < len(leaves) else "not there" for leaves in returned)
        raise _another_each_time(
            f"value {other + 1} of what it returns was {once}, and the second time {again}", changes
        )


def _another_each_time(what: str, changes: Sequence[Change]) -> CaptureError:
    changed = "; ".join(str(change) for change in changes[:3])
    state = f" The step itself changed something: {changed}." if changed else ""
    return CaptureError(f"the step does not do the same each time: {what}.{state} A graph has one path: {WAYS_OUT}")


class Exactly:
    """A plain value that equals only what is the same to the bit."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and exactly_equal(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first position at which two sequences differ; None where they are equal."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def _told(seen: Sequence[OpSeen], position: int, *, arguments: bool = False) -> str:
    if position >= len(seen):
        return "not there (the step has ended)"
    op = seen[position]
    return f"{op} with {op.takes:.120}" if arguments else str(op)
