"""The peak that no plan can go under, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.ir import Graph, Phase, Role
from planner.plan import cannot_drop
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The op at which even a plan that drops everything needs the most, and that need."""

    nbytes: int
    op: str
    start_by_role: tuple[tuple[Role, int], ...]
    fixed_bytes: int  # gradients and whatever else cannot be dropped, made by the step and live there
    op_bytes: int  # what the op itself reads, makes and works in, of what could be dropped
    op_tensors: tuple[tuple[str, int], ...]  # its tensors among these, the largest first, and its workspace

    def __str__(self) -> str:
        start = ", ".join(f"{role.value} {human_bytes(n)}" for role, n in self.start_by_role)
        tensors = ", ".join(f"{name} {human_bytes(n)}" for name, n in self.op_tensors)
        return (
            f"{human_bytes(self.nbytes)} = {start}; gradients and others that cannot be dropped "
            f"{human_bytes(self.fixed_bytes)}; the tensors and workspace of op {self.op!r} {human_bytes(self.op_bytes)}"
            + (f" ({tensors})" if tensors else "")
        )


def floor(graph: Graph) -> Floor:
    """A lower bound on the peak of every schedule, however often it recomputes."""
    least, start = least_bytes(graph), _start_by_role(graph)
    if not len(least):
        return Floor(nbytes=graph.start_bytes, op="-", start_by_role=start, fixed_bytes=0, op_bytes=0, op_tensors=())
    worst = int(least.argmax())
    own = _own_bytes(graph, worst)
    return Floor(
        nbytes=int(least[worst]),
        op=graph.ops[worst].name,
        start_by_role=start,
        fixed_bytes=int(least[worst]) - graph.start_bytes - own,
        op_bytes=own,
        op_tensors=_op_tensors(graph, worst),
    )


def least_bytes(graph: Graph) -> npt.NDArray[np.int64]:
    """Per op: bytes live while it runs under every schedule: what cannot be dropped, and what the op itself needs."""
    return graph.derived(_least_bytes)


def droppable(graph: Graph) -> frozenset[int]:
    """Storages that a schedule may drop and make again, sooner or later."""
    return graph.derived(_droppable)


def _droppable(graph: Graph) -> frozenset[int]:
    makers = enumerate(graph.maker)
    return frozenset(
        s
        for s, made in makers
        if made is not None and graph.ops[made].phase is Phase.FORWARD and cannot_drop(graph, s) is None
    )


def _least_bytes(graph: Graph) -> npt.NDArray[np.int64]:
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if made is None or storage.id in droppable(graph):
            continue
        readers = graph.readers[storage.id]
        held = storage.id in graph.held_storages
        last = len(graph.ops) - 1 if held else (readers[-1] if readers else made)
        change[made] += storage.nbytes
        change[last + 1] -= storage.nbytes
    own = np.array([_own_bytes(graph, op.id) for op in graph.ops], dtype=np.int64)
    return graph.start_bytes + np.cumsum(change[:-1]) + own


def _own_bytes(graph: Graph, op: int) -> int:
    """What an op reads and makes of the droppable, and works in; less what an in-place form could save."""
    touched = {*graph.reads[op], *graph.makes[op]} & droppable(graph)
    return sum(graph.storages[s].nbytes for s in touched) + graph.ops[op].workspace_bytes - _overwrite_bytes(graph, op)


def _op_tensors(graph: Graph, op: int, *, most: int = 4) -> tuple[tuple[str, int], ...]:
    touched = {*graph.reads[op], *graph.makes[op]} & droppable(graph)
    sized = [(graph.storage_names[s], graph.storages[s].nbytes) for s in sorted(touched)]
    sized.sort(key=lambda pair: -pair[1])
    workspace = graph.ops[op].workspace_bytes
    return (*sized[:most], *((("workspace", workspace),) if workspace else ()))


def _overwrite_bytes(graph: Graph, op: int) -> int:
    """What an in-place form could save at most."""
    record = graph.ops[op]
    if not record.overwritable or len(graph.makes[op]) != 1:
        return 0
    nbytes = graph.storages[graph.makes[op][0]].nbytes
    return nbytes if any(graph.storages[graph.values[v].storage].nbytes == nbytes for v in record.overwritable) else 0


def _start_by_role(graph: Graph) -> tuple[tuple[Role, int], ...]:
    inputs = {v.storage for v in graph.values if v.producer is None}
    totals = dict.fromkeys(Role, 0)
    for storage in sorted(inputs):
        totals[graph.storages[storage].role] += graph.storages[storage].nbytes
    return tuple((role, n) for role, n in totals.items() if n)
