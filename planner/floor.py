"""The peak that no plan can go under, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from planner.ir import Graph, Role
from planner.plan import candidates, temporaries
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The op at which even a plan that drops everything needs the most, and that need."""

    nbytes: int
    op: str
    start_by_role: tuple[tuple[Role, int], ...]
    fixed_bytes: int  # gradients and whatever else cannot be dropped, made by the step and live there
    op_bytes: int  # what the op itself reads, makes and works in, of what could be dropped

    def __str__(self) -> str:
        start = ", ".join(f"{role.value} {human_bytes(n)}" for role, n in self.start_by_role)
        return (
            f"{human_bytes(self.nbytes)} = {start}; gradients and others that cannot be dropped "
            f"{human_bytes(self.fixed_bytes)}; the tensors and workspace of op {self.op!r} {human_bytes(self.op_bytes)}"
        )


def floor(graph: Graph) -> Floor:
    """A lower bound on the peak of every plan: at each op, what cannot be dropped and what the op itself needs."""
    droppable = {*candidates(graph), *temporaries(graph)}
    fixed = _fixed_bytes(graph, droppable)
    needs = [fixed[op.id] + _own_bytes(graph, op.id, droppable) for op in graph.ops]
    worst = max(range(len(needs)), key=lambda t: (needs[t], -t), default=None)
    start = _start_by_role(graph)
    if worst is None:
        return Floor(nbytes=graph.start_bytes, op="-", start_by_role=start, fixed_bytes=0, op_bytes=0)
    return Floor(
        nbytes=graph.start_bytes + needs[worst],
        op=graph.ops[worst].name,
        start_by_role=start,
        fixed_bytes=fixed[worst],
        op_bytes=needs[worst] - fixed[worst],
    )


def _fixed_bytes(graph: Graph, droppable: set[int]) -> list[int]:
    """Per op: bytes made by the step that are live across it in every plan (not counting what it makes itself)."""
    change = [0] * (len(graph.ops) + 2)
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if made is None or storage.id in droppable:
            continue
        readers = graph.readers[storage.id]
        end = len(graph.ops) if storage.id in graph.held_storages else (readers[-1] if readers else made)
        change[made + 1] += storage.nbytes
        change[end + 1] -= storage.nbytes
    return list(accumulate(change))[: len(graph.ops)]


def _own_bytes(graph: Graph, op_id: int, droppable: set[int]) -> int:
    """What the op reads of the droppable, makes and works in; an output that may overwrite an input is left out."""
    op = graph.ops[op_id]
    reads = sum(graph.storages[s].nbytes for s in graph.reads[op_id] if s in droppable)
    makes = 0 if op.overwritable else sum(graph.storages[s].nbytes for s in graph.makes[op_id])
    return reads + makes + op.workspace_bytes


def _start_by_role(graph: Graph) -> tuple[tuple[Role, int], ...]:
    inputs = {v.storage for v in graph.values if v.producer is None}
    totals = dict.fromkeys(Role, 0)
    for storage in sorted(inputs):
        totals[graph.storages[storage].role] += graph.storages[storage].nbytes
    return tuple((role, n) for role, n in totals.items() if n)
