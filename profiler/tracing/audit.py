"""A captured step held against what eager does: op by op against one eager step, and against a second trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from profiler.errors import CaptureError, is_machinery
from profiler.ops import aten
from profiler.tracing.guards import Change
from profiler.tracing.provenance import META

# Bookkeeping that differs between a trace and a run, and never in what is computed: aliases, values read back, and the
# copies that autograd makes of a gradient depending on who else holds it.
_BOOKKEEPING = frozenset(
    {
        aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten._local_scalar_dense.default, aten.is_nonzero.default, aten.clone.default, aten.copy_.default,
        aten.new_empty_strided.default, aten.empty_like.default, aten.empty_strided.default,
        aten.empty.memory_format, aten.zeros_like.default, aten.new_zeros.default,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSeen:
    """One op as it ran or was traced, with the line that it comes from.

    `takes` are its arguments, traced ones by the positions of their ops; "" where it ran.
    """

    name: str
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    takes: str
    line: str
    is_view: bool  # computes nothing

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


def _results(made: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def ops_of(graph: fx.Graph) -> tuple[OpSeen, ...]:
    """The ops of a graph as it came from the tracer."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    return tuple(
        OpSeen(
            name=str(node.target),
            results=_results(node.meta.get("val")),
            takes=repr(fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")),
            line=_line_of(node),
            is_view=node.target.is_view,
        )
        for node in graph.nodes
        if node.op == "call_function" and _counts(node.target)
    )


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
        made = func(*args, **(kwargs or {}))
        if not self.paused and _counts(func):
            line = _line(sys._getframe(1))
            self.seen.append(OpSeen(name=str(func), results=_results(made), takes="", line=line, is_view=func.is_view))
        return made


def _line(frame: FrameType | None) -> str:
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def eager_ops(run: Callable[[], Any], *, with_optimizer: bool) -> tuple[OpSeen, ...]:
    """What one eager step runs; without the ops of an optimizer that stays outside of the graph."""
    recorder = _Recorder()
    with recorder, _paused_in_steps(recorder, unless=with_optimizer):
        run()
    return tuple(recorder.seen)


@contextmanager
def _paused_in_steps(recorder: _Recorder, *, unless: bool) -> Iterator[None]:
    def set_paused(paused: bool) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorder.paused = paused and not unless

        return hook

    handles = [register_optimizer_step_pre_hook(set_paused(True)), register_optimizer_step_post_hook(set_paused(False))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# -- comparing ----------------------------------------------------------------------------------------------------


def difference_from_eager(captured: Sequence[OpSeen], eager: Sequence[OpSeen]) -> str:
    """A sentence on the first op in which the captured step is not the eager one; "" where there is none.

    Views are left out: after an in-place op on one (`ReLU(inplace=True)` behind a linear layer on tokens), autograd
    makes it anew, which a trace sees and a run does not.
    """
    captured, eager = ([op for op in seen if not op.is_view] for seen in (captured, eager))
    where = first_difference([op.kind for op in captured], [op.kind for op in eager])
    if where is None:
        return ""
    ours, theirs = (_told(seen, where) for seen in (captured, eager))
    return (
        f"the captured step is not what your step does when it runs: op {where + 1} is {ours} in the capture, and "
        f"{theirs} when the step runs. Code that asks whether it is traced, compiled or given fake tensors takes "
        "another path there: look for a setting of that library that decides it, or plan a part of the model that does "
        "not contain it"
    )


def check_second_trace(first: Sequence[OpSeen], second: Sequence[OpSeen], changes: Sequence[Change]) -> None:
    """CaptureError where a step does something else the second time, with the objects that it changed itself."""
    where = first_difference([op.whole for op in first], [op.whole for op in second])
    if where is None:
        return
    once, again = (_told(seen, where, arguments=True) for seen in (first, second))
    changed = "; ".join(str(change) for change in changes[:3])
    state = f" The step itself changed something: {changed}." if changed else ""
    raise CaptureError(
        f"the step does not do the same each time: op {where + 1} was {once}, and the second time {again}.{state} A "
        "graph has one path: pass what changes in the batch, or plan the model alone with checkpoint_model(model, "
        "budget=...), which leaves the loop as it is"
    )


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first position at which two sequences differ; None where they are equal."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def _told(seen: Sequence[OpSeen], position: int, *, arguments: bool = False) -> str:
    if position >= len(seen):
        return "not there (the step has ended)"
    op = seen[position]
    return f"{op} with {op.takes:.120}" if arguments else str(op)
