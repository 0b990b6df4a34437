"""What to drop and when to bring it back: plans, and plans from a set of storages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import fsum
from pathlib import Path

from planner import files
from planner.analysis import cannot_drop, cannot_move, idle_after, liveness, rerun_reads, temporaries
from planner.errors import FileFormatError, PlanError
from planner.ir import Graph

PLAN_SCHEMA = 1
NEVER_STAGE = 1 << 60  # later than any op


class Restore(Enum):
    """How an evicted storage comes back."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


class BoundClass(Enum):
    """Which schedules a lower bound holds for."""

    RECOMPUTE_ONCE = "every op is recomputed at most once"
    RECOMPUTE_OR_MOVE_ONCE = (
        "every op is recomputed, and every activation moved to the host, at most once; what is below 0.01% of the step "
        "is kept"
    )
    ANY_SCHEDULE = "any schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """`storage` is not resident from the op `free_after` until just before the op `restore_before`.

    In between it may still be made for a moment, as a temporary of somebody else's recomputation. With
    `restore_before` None it never becomes resident again. A storage may have several, one after the other.

    One that is offloaded is copied to the host from `free_after` on; before the op `gone_before` that is waited for and
    its memory freed; before the op `back_before` memory is taken for it again and the copy back begins; before
    `restore_before` that is waited for. The plan names boundaries and no times, so its peak does not hang on any.
    """

    storage: int
    free_after: int
    restore_before: int | None
    how: Restore = Restore.RECOMPUTE
    gone_before: int | None = None
    back_before: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy's proposal. `lower_bound_us` bounds the recompute time of every schedule of `bound_class`."""

    evictions: tuple[Eviction, ...] = ()
    lower_bound_us: float | None = None
    bound_class: BoundClass | None = None
    cut_off: bool = False  # the time limit ended the search: another run may differ
    found_by: str = ""  # the part of the strategy that found it, where there are several
    note: str = ""  # for people: who found it, and how

    @property
    def offloads(self) -> tuple[Eviction, ...]:
        """The evictions that move a storage to the host and back."""
        return tuple(e for e in self.evictions if e.how is Restore.OFFLOAD)

    def save(self, path: str | Path, graph: Graph) -> None:
        """Write the plan as JSON, tied to the graph's fingerprint."""
        saved = _SavedPlan(fingerprint=graph.fingerprint, graph_name=graph.name, plan=self)
        files.save(path, kind="plan", schema=PLAN_SCHEMA, record=saved)

    @staticmethod
    def load(path: str | Path, graph: Graph) -> Plan:
        """Read a plan made for a graph of the same structure, shapes and dtypes; FileFormatError otherwise."""
        saved = files.load(path, kind="plan", schema=PLAN_SCHEMA, cls=_SavedPlan)
        if saved.fingerprint != graph.fingerprint:
            raise FileFormatError(
                f"{path}: made for graph {saved.graph_name!r} ({saved.fingerprint[:12]}), not for "
                f"{graph.name!r} ({graph.fingerprint[:12]}): model, batch shape, dtype or optimizer differ; "
                "plan again for this graph"
            )
        try:
            check_plan(graph, saved.plan)
        except PlanError as error:
            raise FileFormatError(f"{path}: {error}") from None
        return saved.plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedPlan:
    fingerprint: str
    graph_name: str
    plan: Plan


# -- plans from a set of storages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The ops that bring a storage back, and the resident storages that they start from."""

    ops: frozenset[int]
    sources: frozenset[int]

    def time_us(self, graph: Graph) -> float:
        """Run time of the ops, each counted once."""
        return fsum(graph.ops[op].time_us for op in self.ops)


def recomputation(graph: Graph, storage: int, is_resident: Callable[[int], bool]) -> Recomputation:
    """Walk back from `storage` to what is resident, or to the inputs of the step."""
    ops, sources = set[int](), set[int]()
    wanted = [graph.maker[storage]]
    while wanted:
        op = wanted.pop()
        if op is None or op in ops:
            continue
        ops.add(op)
        if op in graph.wait_of:
            ops.add(graph.wait_of[op])
        for v in rerun_reads(graph.ops[op]):
            source = graph.values[v].storage
            if source == storage:
                continue
            if is_resident(source):
                sources.add(source)
            else:
                wanted.append(graph.maker[source])
    return Recomputation(frozenset(ops), frozenset(sources))


def recompute_us(graph: Graph, storage: int, evicted: Container[int]) -> float:
    """Run time of the ops that make `storage` from inputs and from what is not `evicted`."""
    return recomputation(graph, storage, lambda s: s not in evicted).time_us(graph)


def rerun_stages(graph: Graph, dropped: Collection[int]) -> list[int]:
    """Per op: the op before which it is rerun when `dropped` are recomputed once, or NEVER_STAGE.

    A dropped value comes back at the first need after it was freed: a direct reader, or a rerun that reads it.
    """
    freed = {storage: idle_after(graph, storage) for storage in dropped}
    need = [NEVER_STAGE] * len(graph.values)
    stages = [NEVER_STAGE] * len(graph.ops)
    for op in reversed(graph.ops):
        # A view made after the eviction, in the backward, is made in the clone: it was never lost.
        lost = [v for v in op.outputs if op.id <= freed.get(graph.values[v].storage, -1)]
        stage = min((need[v] for v in lost), default=NEVER_STAGE)
        stages[op.id] = stage
        for v in op.inputs:
            after = freed.get(graph.values[v].storage)
            if after is not None and after < op.id < need[v]:
                need[v] = op.id
        if stage == NEVER_STAGE:
            continue
        for v in rerun_reads(op):
            after = freed.get(graph.values[v].storage)
            if after is not None and after < stage < need[v]:
                need[v] = stage
    return stages


def recompute_once(graph: Graph, dropped: Iterable[int], *, kept: Collection[int] = ()) -> Plan:
    """The plan that frees `dropped` in their idle gap and recomputes each once, at its first need.

    From then on a clone stays resident until its last use, so every later need shares it. Temporaries of the
    forward are dropped as well unless named in `kept`: held ones serve as sources of recomputation.
    """
    chosen = _chosen(graph, dropped, kept)
    stages = rerun_stages(graph, chosen)
    return Plan(evictions=tuple(_once(graph, storage, stages) for storage in sorted(chosen)))


def _chosen(graph: Graph, dropped: Iterable[int], kept: Collection[int]) -> set[int]:
    """What is dropped, with the temporaries that are not kept."""
    chosen = set(dropped)
    for storage in chosen:
        if not 0 <= storage < len(graph.storages):
            raise PlanError(f"{graph.name}: there is no storage {storage}; it has {len(graph.storages):,}")
    chosen.update(s for s in temporaries(graph) if s not in kept)
    return chosen


def _once(graph: Graph, storage: int, stages: Sequence[int]) -> Eviction:
    reason = cannot_drop(graph, storage)
    if reason is not None:
        raise PlanError(f"storage of {graph.storage_names[storage]!r} cannot be dropped: {reason}")
    made = graph.maker[storage]
    assert made is not None
    after, stage = idle_after(graph, storage), stages[made]
    needed = _needed_again(graph, storage, after, stages)
    restore = stage if needed and stage != NEVER_STAGE else None
    return Eviction(storage=storage, free_after=after, restore_before=restore)


def _needed_again(graph: Graph, storage: int, after: int, stages: Sequence[int]) -> bool:
    for reader in graph.readers[storage]:
        if reader > after:
            return True
        if after < stages[reader] < NEVER_STAGE and _rerun_reads_storage(graph, reader, storage):
            return True
    return False


def _rerun_reads_storage(graph: Graph, op: int, storage: int) -> bool:
    return any(graph.values[v].storage == storage for v in rerun_reads(graph.ops[op]))


def recompute_each_time(graph: Graph, dropped: Iterable[int], *, kept: Collection[int] = ()) -> Plan:
    """The plan that frees `dropped` in their idle gap and holds a clone only from its own backward need on.

    Before that need, a recomputation that passes through it makes it as a temporary, every time.
    """
    chosen = _chosen(graph, dropped, kept)
    return Plan(
        evictions=tuple(
            Eviction(
                storage=s,
                free_after=idle_after(graph, s),
                restore_before=liveness(graph)[s].idle_until,
            )
            for s in sorted(chosen)
        )
    )


# -- checks -----------------------------------------------------------------------------------------------------


def check_plan(graph: Graph, plan: Plan) -> None:
    """Raise PlanError unless every eviction names a storage that may be evicted, and ops in order."""
    for eviction in plan.evictions:
        _check_types(eviction)
    last: dict[int, int] = {}
    for eviction in sorted(plan.evictions, key=lambda e: (e.storage, e.free_after)):
        _check_eviction(graph, eviction, last)


def _check_types(eviction: object) -> None:
    if not isinstance(eviction, Eviction):
        raise PlanError(f"{eviction!r:.60} is no Eviction")
    places = (eviction.restore_before, eviction.gone_before, eviction.back_before)
    if not (_is_id(eviction.storage) and _is_id(eviction.free_after)) or not all(
        place is None or _is_id(place) for place in places
    ):
        raise PlanError(f"{eviction!r:.120}: storages and ops are named by their ids, whole numbers")


def _is_id(place: object) -> bool:
    return type(place) is int or hasattr(place, "__index__")  # numpy's numbers as well


def _check_eviction(graph: Graph, eviction: Eviction, last: dict[int, int]) -> None:
    storage, after, before = eviction.storage, eviction.free_after, eviction.restore_before
    if not 0 <= storage < len(graph.storages):
        raise PlanError(f"{eviction}: there is no storage {storage}")
    name = graph.storage_names[storage]
    _check_how(graph, eviction, name)
    made = graph.maker[storage]
    assert made is not None
    if not made <= after < len(graph.ops):
        raise PlanError(f"storage of {name!r} is to be freed after op {after}; it exists from op {made} on")
    if before is not None and not after < before < len(graph.ops):
        raise PlanError(f"storage of {name!r} is to be restored before op {before}, freed after op {after}")
    if after < last.get(storage, -1):
        raise PlanError(f"storage of {name!r} is evicted after op {after}, while it is still evicted")
    if eviction.how is Restore.OFFLOAD:
        _check_boundaries(graph, eviction, name)
    last[storage] = len(graph.ops) if before is None else before


def _check_how(graph: Graph, eviction: Eviction, name: str) -> None:
    match eviction.how:
        case Restore.RECOMPUTE:
            reason = cannot_drop(graph, eviction.storage)
            if reason is not None:
                raise PlanError(f"storage of {name!r} cannot be dropped: {reason}")
            if not eviction.gone_before is eviction.back_before is None:
                raise PlanError(f"storage of {name!r} is recomputed: only what is moved to the host has boundaries")
        case Restore.OFFLOAD:
            reason = cannot_move(graph, eviction.storage)
            if reason is not None:
                raise PlanError(f"storage of {name!r} cannot be moved to the host: {reason}")
        case _:
            raise PlanError(f"{eviction!r:.120}: how it comes back is a Restore")


def _check_boundaries(graph: Graph, eviction: Eviction, name: str) -> None:
    """Copied out, gone, coming back, back: in that order, and nobody writes to it meanwhile."""
    after, before = eviction.free_after, eviction.restore_before
    gone, back = eviction.gone_before, eviction.back_before
    if before is None or gone is None or back is None:
        raise PlanError(
            f"storage of {name!r} is moved to the host: a plan says before which op it is gone, before which it is on "
            "its way back, and before which it is back"
        )
    if not after < gone <= back <= before:
        raise PlanError(
            f"storage of {name!r} is copied out after op {after}, gone before op {gone}, on its way back before op "
            f"{back} and back before op {before}: these must follow one another"
        )
    writers = [graph.ops[op].name for op in graph.writers[eviction.storage] if after < op < before]
    if writers:
        raise PlanError(f"storage of {name!r} is moved to the host while op {writers[0]!r} writes to it")


def with_bound(plan: Plan, *, lower_bound_us: float, bound_class: BoundClass) -> Plan:
    """The same plan with a proven bound on the recompute time."""
    return replace(plan, lower_bound_us=lower_bound_us, bound_class=bound_class)
