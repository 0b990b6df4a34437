"""What a graph says of itself: when storages are used, which may be dropped, and the peak no plan can go under."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from planner.ir import Graph, Op, Phase, Rerun, Role
from planner.units import human_bytes

# -- when a storage is used -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a storage is made and used, in ids of ops; None where there is no such use.

    `idle_after` and `idle_until` bound the gap that an eviction would use: the last use before the first
    backward op that follows its making, and the next use. None for what is not made in the forward, or not
    used again after that turn. `inactive_us` is the run time between them.
    """

    storage: int
    created_at: int | None
    first_fw_access: int | None
    last_fw_access: int | None
    first_bw_access: int | None
    last_bw_access: int | None
    last_access: int | None
    idle_after: int | None
    idle_until: int | None
    inactive_us: float


def liveness(graph: Graph) -> tuple[Liveness, ...]:
    """Per storage: when it is made and used."""
    return graph.derived(_all_liveness)


def _all_liveness(graph: Graph) -> tuple[Liveness, ...]:
    turns = [op.id for op in graph.ops if op.phase is Phase.BACKWARD]
    return tuple(_liveness(graph, storage.id, turns) for storage in graph.storages)


def _liveness(graph: Graph, storage: int, backward_ops: Sequence[int]) -> Liveness:
    uses = graph.readers[storage]
    forward = [u for u in uses if graph.ops[u].phase is Phase.FORWARD]
    backward = [u for u in uses if graph.ops[u].phase is Phase.BACKWARD]
    after, until = _idle_gap(graph, storage, backward_ops)
    inactive = 0.0
    if after is not None and until is not None:
        inactive = graph.elapsed_us[until] - graph.elapsed_us[after + 1]
    return Liveness(
        storage=storage,
        created_at=graph.maker[storage],
        first_fw_access=forward[0] if forward else None,
        last_fw_access=forward[-1] if forward else None,
        first_bw_access=backward[0] if backward else None,
        last_bw_access=backward[-1] if backward else None,
        last_access=uses[-1] if uses else None,
        idle_after=after,
        idle_until=until,
        inactive_us=max(inactive, 0.0),
    )


def _idle_gap(graph: Graph, storage: int, backward_ops: Sequence[int]) -> tuple[int | None, int | None]:
    made = graph.maker[storage]
    if made is None or graph.ops[made].phase is not Phase.FORWARD:
        return None, None
    first = bisect_left(backward_ops, made)
    if first == len(backward_ops):
        return None, None
    uses = graph.readers[storage]
    split = bisect_left(uses, backward_ops[first])
    if split == len(uses):
        return None, None
    # A storage nobody reads before the backward idles from the moment it is made.
    return (uses[split - 1] if split else made), uses[split]


def idle_after(graph: Graph, storage: int) -> int:
    """The op after which an evicted storage is freed: its last use before it idles."""
    live = liveness(graph)[storage]
    after = live.idle_after if live.idle_until is not None else live.last_access
    return after if after is not None else graph.maker[storage] or 0


# -- what may be dropped ----------------------------------------------------------------------------------------


def cannot_drop(graph: Graph, storage: int) -> str | None:
    """Why a storage can never be evicted, or None if it can."""
    if why := _not_of_this_step(graph, storage):
        return why
    if graph.writers[storage]:
        return f"op {graph.ops[graph.writers[storage][0]].name!r} writes to it after it was made"
    for v in graph.values_in[storage]:  # a view that cannot be derived again ties its storage down as well
        op = graph.ops[graph.values[v].producer or 0]
        if op.rerun is Rerun.NEVER:
            return f"op {op.name!r} may never be rerun: {op.never_reason}"
    return None


def cannot_move(graph: Graph, storage: int) -> str | None:
    """Why a storage can never be moved to the host and back, or None if it can."""
    if why := _not_of_this_step(graph, storage):
        return why
    return None if graph.storages[storage].nbytes else "it has no bytes"


def _not_of_this_step(graph: Graph, storage: int) -> str | None:
    """Why a storage does not live and die within the step, or None if it does."""
    made = graph.maker[storage]
    if made is None and storage not in graph.held_storages:
        return "it is a generator state, saved only where a rerun needs it"
    if made is None:
        return "it is live before the step"
    return "it outlives the step" if storage in graph.held_storages else None


def movable(graph: Graph) -> tuple[int, ...]:
    """Activations that a plan may move to the host: made in the forward, idle until the backward, written by nobody
    meanwhile. More than `candidates`: what may never be recomputed can still be moved.
    """
    return graph.derived(_movable)


def _movable(graph: Graph) -> tuple[int, ...]:
    return tuple(s.id for s in graph.storages if cannot_move(graph, s.id) is None and _idles_unwritten(graph, s.id))


def _idles_unwritten(graph: Graph, storage: int) -> bool:
    live = liveness(graph)[storage]
    after, until = live.idle_after, live.idle_until
    if after is None or until is None or until - after < 2:
        return False
    return not any(after < writer < until for writer in graph.writers[storage])


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


def candidates(graph: Graph) -> tuple[int, ...]:
    """Activations that a plan may drop: made in the forward, idle until the backward, recomputable."""
    return graph.derived(_recomputable)[0]


def temporaries(graph: Graph) -> tuple[int, ...]:
    """Recomputable forward storages with no use after the turn to the backward: sources, at best."""
    return graph.derived(_recomputable)[1]


def _recomputable(graph: Graph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Candidates and temporaries, in id order.

    A rerun must read its inputs as they were. The latest moment a storage can be asked for is the latest need
    of anything recomputed from it; one whose maker reads what is written before that moment is left out.
    """
    latest = [-1] * len(graph.storages)
    found: tuple[list[int], list[int]] = ([], [])
    for op in reversed(graph.ops):
        for storage in graph.makes[op.id]:
            if op.phase is not Phase.FORWARD or cannot_drop(graph, storage) is not None:
                continue
            until = liveness(graph)[storage].idle_until
            rerun_needs = (latest[s] for r in graph.readers[storage] for s in graph.makes[r])
            need = max(until if until is not None else -1, max(rerun_needs, default=-1))
            if written_between(graph, op, need) is None:
                latest[storage] = need
                found[until is None].append(storage)
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


def written_between(graph: Graph, op: Op, before: int) -> tuple[int, int] | None:
    """The first input value that a rerun of `op` just before op `before` would find changed, and its writer."""
    for v in rerun_reads(op):
        writers = graph.writers[graph.values[v].storage]
        first = bisect_left(writers, op.id)
        if first < len(writers) and writers[first] < before:
            return v, writers[first]
    return None


def rerun_reads(op: Op) -> tuple[int, ...]:
    """The values that a second run of `op` reads: one without side effect leaves out what it mutates."""
    if op.rerun is not Rerun.WITHOUT_SIDE_EFFECT:
        return op.inputs
    return tuple(v for v in op.inputs if v not in op.mutates)


# -- the peak no plan can go under ------------------------------------------------------------------------------


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


def floor(graph: Graph, *, in_place: bool = True, moving: bool = False) -> Floor:
    """A lower bound on the peak of every schedule, however often it recomputes; or, `moving`, moves to the host."""
    least, start = least_bytes(graph, in_place=in_place, moving=moving), _start_by_role(graph)
    if not len(least):
        return Floor(nbytes=graph.start_bytes, op="-", start_by_role=start, fixed_bytes=0, op_bytes=0, op_tensors=())
    worst = int(least.argmax())
    own = _own_bytes(graph, worst, in_place=in_place, moving=moving)
    return Floor(
        nbytes=int(least[worst]),
        op=graph.ops[worst].name,
        start_by_role=start,
        fixed_bytes=int(least[worst]) - graph.start_bytes - own,
        op_bytes=own,
        op_tensors=_op_tensors(graph, worst, moving=moving),
    )


def evictable(graph: Graph, *, moving: bool) -> frozenset[int]:
    """What a schedule may do without for a while: what it can make again or, `moving`, bring back from the host."""
    return graph.derived(_evictable) if moving else droppable(graph)


def _evictable(graph: Graph) -> frozenset[int]:
    return droppable(graph) | {s.id for s in graph.storages if cannot_move(graph, s.id) is None}


def least_bytes(graph: Graph, *, in_place: bool = True, moving: bool = False) -> npt.NDArray[np.int64]:
    """Per op: bytes live while it runs under every schedule: what cannot be evicted, and what the op itself needs."""
    return graph.derived(_LEAST_BYTES[in_place, moving])


def _least_bytes(graph: Graph, *, in_place: bool, moving: bool) -> npt.NDArray[np.int64]:
    change = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if made is None or storage.id in evictable(graph, moving=moving):
            continue
        readers = graph.readers[storage.id]
        held = storage.id in graph.held_storages
        last = len(graph.ops) - 1 if held else (readers[-1] if readers else made)
        change[made] += storage.nbytes
        change[last + 1] -= storage.nbytes
    own = [_own_bytes(graph, op.id, in_place=in_place, moving=moving) for op in graph.ops]
    return graph.start_bytes + np.cumsum(change[:-1]) + np.array(own, dtype=np.int64)


# One object for each, so that a graph remembers its answer.
_LEAST_BYTES = {
    (in_place, moving): partial(_least_bytes, in_place=in_place, moving=moving)
    for in_place in (True, False)
    for moving in (True, False)
}


def _own_bytes(graph: Graph, op: int, *, in_place: bool, moving: bool) -> int:
    """What an op reads and makes of the evictable, and works in; less what an in-place form could save."""
    touched = {*graph.reads[op], *graph.makes[op]} & evictable(graph, moving=moving)
    saved = _overwrite_bytes(graph, op) if in_place else 0
    return sum(graph.storages[s].nbytes for s in touched) + graph.ops[op].workspace_bytes - saved


def _op_tensors(graph: Graph, op: int, *, moving: bool, most: int = 4) -> tuple[tuple[str, int], ...]:
    touched = {*graph.reads[op], *graph.makes[op]} & evictable(graph, moving=moving)
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
