"""What to drop and when to bring it back (Plan), and the exact steps that this means (Schedule).

`lower` is the only place where a plan becomes a sequence of steps. The simulator scores that sequence and the
rewriter replays it, so what was scored is what runs.
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from math import fsum
from pathlib import Path

from planner import files
from planner.errors import FileFormatError, PlanError
from planner.ir import Graph, Op, Phase, Rerun, Role

PLAN_SCHEMA = 1
NEVER_STAGE = 1 << 60  # later than any op


class Restore(Enum):
    """How an evicted storage comes back."""

    RECOMPUTE = "recompute"


class BoundClass(Enum):
    """Which schedules a lower bound holds for."""

    RECOMPUTE_ONCE = "every op is recomputed at most once"
    ANY_SCHEDULE = "any schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """`storage` is not resident from the op `free_after` until just before the op `restore_before`.

    In between it may still be made for a moment, as a temporary of somebody else's recomputation. With
    `restore_before` None it never becomes resident again. A storage may have several, one after the other.
    """

    storage: int
    free_after: int
    restore_before: int | None
    how: Restore = Restore.RECOMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy's proposal. `lower_bound_us` bounds the recompute time of every schedule of `bound_class`."""

    evictions: tuple[Eviction, ...] = ()
    lower_bound_us: float | None = None
    bound_class: BoundClass | None = None
    cut_off: bool = False  # the time limit ended the search: another run may differ
    found_by: str = ""  # the part of the strategy that found it, where there are several
    note: str = ""  # for people: who found it, and how

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


class RunKind(Enum):
    """Why an op runs at a step."""

    ORIGINAL = "original"
    ORIGINAL_SAVING_RNG = "original, saving the generator state"
    RERUN = "rerun"


@dataclass(frozen=True, slots=True)
class Run:
    """Run `op`; with `into`, write its output over that storage, which is dead from then on."""

    op: int
    into: int | None = None
    kind: RunKind = RunKind.ORIGINAL


@dataclass(frozen=True, slots=True)
class Free:
    """Release `storage` and every value in it."""

    storage: int


Step = Run | Free


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a whole training step, in order."""

    steps: tuple[Step, ...]

    def text(self, graph: Graph) -> str:
        """One step a line, for people and for golden tests."""
        return "\n".join(_step_text(graph, step) for step in self.steps)


def _step_text(graph: Graph, step: Step) -> str:
    if isinstance(step, Free):
        return f"  free {graph.storage_names[step.storage]}"
    into = f" into {graph.storage_names[step.into]}" if step.into is not None else ""
    kind = f" ({step.kind.value})" if step.kind is not RunKind.ORIGINAL else ""
    return f"run {graph.ops[step.op].name}{into}{kind}"


# -- what may be dropped ----------------------------------------------------------------------------------------


def cannot_drop(graph: Graph, storage: int) -> str | None:
    """Why a storage can never be evicted, or None if it can."""
    made = graph.maker[storage]
    if made is None and storage not in graph.held_storages:
        return "it is a generator state, saved only where a rerun needs it"
    if made is None:
        return "it is live before the step"
    if storage in graph.held_storages:
        return "it outlives the step"
    if graph.writers[storage]:
        return f"op {graph.ops[graph.writers[storage][0]].name!r} writes to it after it was made"
    for v in graph.values_in[storage]:  # a view that cannot be derived again ties its storage down as well
        op = graph.ops[graph.values[v].producer or 0]
        if op.rerun is Rerun.NEVER:
            return f"op {op.name!r} may never be rerun: {op.never_reason}"
    return None


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
            until = graph.liveness[storage].idle_until
            rerun_needs = (latest[s] for r in graph.readers[storage] for s in graph.makes[r])
            need = max(until if until is not None else -1, max(rerun_needs, default=-1))
            if _written_between(graph, op, need) is None:
                latest[storage] = need
                found[until is None].append(storage)
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


def _written_between(graph: Graph, op: Op, before: int) -> tuple[int, int] | None:
    """The first input value that a rerun of `op` just before op `before` would find changed, and its writer."""
    for v in rerun_reads(op):
        writers = graph.writers[graph.values[v].storage]
        first = bisect_left(writers, op.id)
        if first < len(writers) and writers[first] < before:
            return v, writers[first]
    return None


def idle_after(graph: Graph, storage: int) -> int:
    """The op after which an evicted storage is freed: its last use before it idles."""
    live = graph.liveness[storage]
    after = live.idle_after if live.idle_until is not None else live.last_access
    return after if after is not None else graph.maker[storage] or 0


# -- plans from a set of storages -------------------------------------------------------------------------------


def rerun_reads(op: Op) -> tuple[int, ...]:
    """The values that a second run of `op` reads: one without side effect leaves out what it mutates."""
    if op.rerun is not Rerun.WITHOUT_SIDE_EFFECT:
        return op.inputs
    return tuple(v for v in op.inputs if v not in op.mutates)


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
        for v in rerun_reads(graph.ops[op]):
            source = graph.values[v].storage
            if source == storage:
                continue
            if is_resident(source):
                sources.add(source)
            else:
                wanted.append(graph.maker[source])
    return Recomputation(frozenset(ops), frozenset(sources))


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
    chosen = set(dropped)
    chosen.update(s for s in temporaries(graph) if s not in kept)
    stages = rerun_stages(graph, chosen)
    return Plan(evictions=tuple(_once(graph, storage, stages) for storage in sorted(chosen)))


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
    chosen = set(dropped)
    chosen.update(s for s in temporaries(graph) if s not in kept)
    return Plan(
        evictions=tuple(
            Eviction(
                storage=s,
                free_after=idle_after(graph, s),
                restore_before=graph.liveness[s].idle_until,
            )
            for s in sorted(chosen)
        )
    )


# -- checks -----------------------------------------------------------------------------------------------------


def check_plan(graph: Graph, plan: Plan) -> None:
    """Raise PlanError unless every eviction names a droppable storage and two ops in order."""
    last: dict[int, int] = {}
    for eviction in sorted(plan.evictions, key=lambda e: (e.storage, e.free_after)):
        _check_eviction(graph, eviction, last)


def _check_eviction(graph: Graph, eviction: Eviction, last: dict[int, int]) -> None:
    storage, after, before = eviction.storage, eviction.free_after, eviction.restore_before
    if not 0 <= storage < len(graph.storages):
        raise PlanError(f"{eviction}: there is no storage {storage}")
    name = graph.storage_names[storage]
    reason = cannot_drop(graph, storage)
    if reason is not None:
        raise PlanError(f"storage of {name!r} cannot be dropped: {reason}")
    made = graph.maker[storage]
    assert made is not None
    if not made <= after < len(graph.ops):
        raise PlanError(f"storage of {name!r} is to be freed after op {after}; it exists from op {made} on")
    if before is not None and not after < before < len(graph.ops):
        raise PlanError(f"storage of {name!r} is to be restored before op {before}, freed after op {after}")
    if after < last.get(storage, -1):
        raise PlanError(f"storage of {name!r} is evicted after op {after}, while it is still evicted")
    last[storage] = len(graph.ops) if before is None else before


# -- lowering ---------------------------------------------------------------------------------------------------


@cache
def _run(op: int) -> Run:
    return Run(op)


@cache
def _free(storage: int) -> Free:
    return Free(storage)


def lower(graph: Graph, plan: Plan, *, in_place: bool = True) -> Schedule:
    """The exact steps of `plan`: what runs, in which order, and what is freed when.

    Before an op runs, what it lacks is recomputed from what is resident, in execution order, each op once;
    what is only needed for that is freed at its last use. With `in_place`, an op that may overwrite an input
    does so where that input dies. PlanError names the op of a plan that cannot be carried out.
    """
    check_plan(graph, plan)
    lowering = _Lowering(graph, plan)
    lowering.walk()
    return Schedule(tuple(lowering.emit(in_place=in_place)))


class _Lowering:
    """The state of one walk over the execution order.

    A storage lives in episodes: from a run that makes it to its last use before it is evicted or the step
    ends. `walk` decides the runs and the last uses; `emit` then puts every Free right after the last use.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.free_after: dict[int, list[int]] = {}
        self.restore_before: dict[int, list[int]] = {}
        for eviction in plan.evictions:
            self.free_after.setdefault(eviction.free_after, []).append(eviction.storage)
            if eviction.restore_before is not None:
                self.restore_before.setdefault(eviction.restore_before, []).append(eviction.storage)
        self.runs: list[int] = []  # op per step; negative (~op) for a rerun
        self.dies_at: dict[int, list[int]] = {}  # step -> storages whose episode ends there
        self.last_use = [-1] * len(graph.storages)  # step of the last use in the open episode; -1 if none is open
        self.copies: dict[int, list[int]] = {}  # storage -> reruns that made it again while its episode was open
        self.evicted = bytearray(len(graph.storages))
        self.available = bytearray(value.producer is None for value in graph.values)
        self.rng_last_use: dict[int, int] = {}  # op -> step of its last rerun

    def walk(self) -> None:
        graph, available, last_use = self.graph, self.available, self.last_use
        reads, makes, runs = graph.reads, graph.makes, self.runs
        is_available = available.__getitem__
        for op in graph.ops:
            t = op.id
            restored: list[int] = []
            if t in self.restore_before or not all(map(is_available, op.inputs)):
                restored = self._restore(op)
            step = len(runs)
            runs.append(t)
            for storage in reads[t]:
                last_use[storage] = step
            for storage in makes[t]:
                last_use[storage] = step
            for v in op.outputs:
                available[v] = 1
            for storage in restored:
                if self.evicted[storage]:
                    self._close(storage)
            if t in self.free_after:
                for storage in self.free_after[t]:
                    self._close(storage)
                    self.evicted[storage] = 1
        for storage, step in enumerate(last_use):
            if step >= 0 and storage not in graph.held_storages:
                self._close(storage)

    def _restore(self, op: Op) -> list[int]:
        """Recompute what `op` lacks and what the plan wants back before it; return the storages made."""
        available = self.available
        missing = [v for v in op.inputs if not available[v]]
        for storage in self.restore_before.get(op.id, ()):
            self.evicted[storage] = 0
            if self.last_use[storage] < 0:
                missing.append(self._made_value(storage))
        if not missing:
            return []
        made: list[int] = []
        for rerun in sorted(self._chain(missing, before=op)):
            made.extend(self._rerun(self.graph.ops[rerun]))
        return made

    def _made_value(self, storage: int) -> int:
        made = self.graph.maker[storage]
        assert made is not None
        values = self.graph.values
        return next(v for v in self.graph.ops[made].outputs if values[v].storage == storage and values[v].base is None)

    def _chain(self, missing: list[int], *, before: Op) -> set[int]:
        """The ops to rerun so that `missing` become available."""
        graph, available = self.graph, self.available
        chain: set[int] = set()
        while missing:
            producer = graph.values[missing.pop()].producer
            if producer is None or producer in chain:
                continue
            op = graph.ops[producer]
            self._check_rerun(op, before=before)
            chain.add(producer)
            missing.extend(v for v in rerun_reads(op) if not available[v])
        return chain

    def _check_rerun(self, op: Op, *, before: Op) -> None:
        if op.rerun is Rerun.NEVER:
            raise PlanError(
                f"op {op.name!r} would have to be rerun before {before.name!r}, but never may be: {op.never_reason}"
            )
        changed = _written_between(self.graph, op, before.id)
        if changed is not None:
            value, writer = self.graph.values[changed[0]].name, self.graph.ops[changed[1]].name
            raise PlanError(
                f"op {op.name!r} would be rerun before {before.name!r}, "
                f"but its input {value!r} was changed by {writer!r} since"
            )

    def _rerun(self, op: Op) -> list[int]:
        graph, values = self.graph, self.graph.values
        step = len(self.runs)
        self.runs.append(~op.id)
        for v in rerun_reads(op):
            self.last_use[values[v].storage] = step
        made = []
        for storage in graph.makes[op.id]:
            if self.last_use[storage] >= 0:
                self.copies.setdefault(storage, []).append(step)
            else:
                self.last_use[storage] = step
                made.append(storage)
        for v in op.outputs:
            self.available[v] = 1
        if op.rng_state is not None:
            self.rng_last_use[op.id] = step
        return made

    def _close(self, storage: int) -> None:
        """End the open episode of `storage` at its last use: its values are gone from then on."""
        step = self.last_use[storage]
        if step < 0:
            return
        self.dies_at.setdefault(step, []).append(storage)
        for copy in self.copies.pop(storage, ()):
            if copy > step:  # the rerun of a sibling made it anew when nobody needed it any more
                self.dies_at.setdefault(copy, []).append(storage)
        self.last_use[storage] = -1
        for v in self.graph.values_in[storage]:
            self.available[v] = 0

    def emit(self, *, in_place: bool) -> list[Step]:
        graph, steps = self.graph, list[Step]()
        for op_id, step in self.rng_last_use.items():
            state = graph.ops[op_id].rng_state
            assert state is not None
            self.dies_at.setdefault(step, []).append(state)
        for step, code in enumerate(self.runs):
            dying = self.dies_at.get(step, ())
            op_id = code if code >= 0 else ~code
            into = overwritten(graph, graph.ops[op_id], dying) if in_place and dying else None
            if code < 0:
                steps.append(Run(op_id, into, RunKind.RERUN))
            elif op_id in self.rng_last_use:
                steps.append(Run(op_id, into, RunKind.ORIGINAL_SAVING_RNG))
            else:
                steps.append(_run(op_id) if into is None else Run(op_id, into))
            if dying:
                steps.extend([_free(storage) for storage in sorted(dying) if storage != into])
        return steps


def overwritten(graph: Graph, op: Op, dying: Collection[int]) -> int | None:
    """The dying input that `op` may write its first output over, or None.

    Legal where nothing reads the input's storage after this step (so no alias of it does), it has exactly the
    size of the new output, the op sees it through one input only, and the output outlives the step.
    """
    if not op.overwritable or len(op.outputs) != 1:
        return None
    output = graph.values[op.outputs[0]]
    if output.base is not None or output.storage in dying:
        return None
    for v in op.overwritable:
        storage = graph.values[v].storage
        if storage not in dying or graph.storages[storage].nbytes != graph.storages[output.storage].nbytes:
            continue
        if sum(graph.values[i].storage == storage for i in op.inputs) == 1:
            return storage
    return None


# -- a table for people -----------------------------------------------------------------------------------------


def write_csv(path: str | Path, graph: Graph, plan: Plan) -> None:
    """One row per activation: KEEP or RECOMPUTE, its size, what its own op costs, where it goes and returns."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "module", "decision", "bytes", "op_time_us", "dropped_after", "restored_before"])
        writer.writerows(_csv_rows(graph, plan))


def _csv_rows(graph: Graph, plan: Plan) -> Iterable[list[object]]:
    evictions: dict[int, list[Eviction]] = {}
    for eviction in plan.evictions:
        evictions.setdefault(eviction.storage, []).append(eviction)
    for storage in graph.storages:
        made = graph.maker[storage.id]
        if storage.role is not Role.ACTIVATION or made is None or graph.liveness[storage.id].idle_until is None:
            continue  # what the backward never reads is no choice
        gone = evictions.get(storage.id, [])
        dropped = " ".join(graph.ops[e.free_after].name for e in gone)
        restored = " ".join(graph.ops[e.restore_before].name for e in gone if e.restore_before is not None)
        op = graph.ops[made]
        decision = "RECOMPUTE" if gone else "KEEP"
        name = graph.storage_names[storage.id]
        yield [name, op.module_path, decision, storage.nbytes, op.time_us, dropped, restored]


def with_bound(plan: Plan, *, lower_bound_us: float, bound_class: BoundClass) -> Plan:
    """The same plan with a proven bound on the recompute time."""
    return replace(plan, lower_bound_us=lower_bound_us, bound_class=bound_class)
