"""The exact steps that a plan means.

`lower` is the only place where a plan becomes a sequence of steps. The simulator scores that sequence and the
rewriter replays it, so what was scored is what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import assert_never

from planner.analysis import rerun_reads, written_between
from planner.errors import LinkError, PlanError
from planner.host_link import HostLink
from planner.ir import Graph, Op, Rerun
from planner.plan import Eviction, Plan, Restore, check_plan


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


class Work(Enum):
    """What goes on beside the ops."""

    COPY_OUT = "copy out"
    COPY_IN = "copy in"
    COLLECTIVE = "communication"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where work of one kind stands in line: one piece at a time, in the order launched, beside ops and other lanes.

    `group` tells lanes of one kind apart, where there are several.
    """

    work: Work
    group: str = ""


COPY_OUT, COPY_IN = Lane(Work.COPY_OUT), Lane(Work.COPY_IN)


@dataclass(frozen=True, slots=True)
class Launch:
    """Begin the lane's work on `storage`. What it reads is held, and what it writes takes memory, from here on.

    Where the work is a collective, `op` is the one that has just begun it, and made what it writes.
    """

    lane: Lane
    storage: int
    op: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on only when what was launched on `lane` for `storage` is done; of a collective, the op that waits follows."""

    lane: Lane
    storage: int


Step = Run | Free | Launch | Wait


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a whole training step, in order. `link` says how long copies take; none of its bytes hang on it."""

    steps: tuple[Step, ...]
    link: HostLink | None = None

    @property
    def runs(self) -> tuple[Run, ...]:
        """The steps that run an op, in order."""
        return tuple(step for step in self.steps if isinstance(step, Run))

    @property
    def moves(self) -> bool:
        """Whether anything is copied to the host."""
        return any(isinstance(step, Launch) and step.lane == COPY_OUT for step in self.steps)

    def text(self, graph: Graph) -> str:
        """One step a line, for people and for golden tests."""
        return "\n".join(_step_text(graph, step) for step in self.steps)


def _step_text(graph: Graph, step: Step) -> str:
    match step:
        case Run():
            into = f" into {graph.storage_names[step.into]}" if step.into is not None else ""
            kind = f" ({step.kind.value})" if step.kind is not RunKind.ORIGINAL else ""
            return f"run {graph.ops[step.op].name}{into}{kind}"
        case Free():
            return f"  free {graph.storage_names[step.storage]}"
        case Launch():
            return f"  launch {step.lane.work.value} {graph.storage_names[step.storage]}"
        case Wait():
            return f"  wait for {step.lane.work.value} {graph.storage_names[step.storage]}"
        case _:
            assert_never(step)


@cache
def _run(op: int) -> Run:
    return Run(op)


@cache
def _free(storage: int) -> Free:
    return Free(storage)


@cache
def _lane(group: str) -> Lane:
    return Lane(Work.COLLECTIVE, group)


def lower(graph: Graph, plan: Plan, *, in_place: bool = True, link: HostLink | None = None) -> Schedule:
    """The exact steps of `plan`: what runs, in which order, and what is freed when.

    Before an op runs, what it lacks is recomputed from what is resident, in execution order, each op once;
    what is only needed for that is freed at its last use. With `in_place`, an op that may overwrite an input
    does so where that input dies. What is moved to the host goes and comes over `link`, at the boundaries that the plan
    names. PlanError names the op of a plan that cannot be carried out, LinkError one that lacks the link.
    """
    check_plan(graph, plan)
    if link is None and plan.offloads:
        name = graph.storage_names[plan.offloads[0].storage]
        raise LinkError(
            f"the plan moves {len(plan.offloads)} tensors to the host, {name!r} first, and there is no link to it: "
            "say how fast it is (host_link=...), or plan again without"
        )
    lowering = _Lowering(graph, plan)
    lowering.walk()
    return Schedule(tuple(lowering.emit(in_place=in_place)), link)


def unplanned_schedule(graph: Graph, *, in_place: bool = True) -> Schedule:
    """The steps of the empty plan, lowered once a graph."""
    return graph.derived(_unplanned_in_place if in_place else _unplanned)


def _unplanned_in_place(graph: Graph) -> Schedule:
    return lower(graph, Plan())


def _unplanned(graph: Graph) -> Schedule:
    return lower(graph, Plan(), in_place=False)


class _Lowering:
    """The state of one walk over the execution order.

    A storage lives in episodes: from a run that makes it to its last use before it is evicted or the step
    ends. `walk` decides the runs and the last uses; `emit` then puts every Free right after the last use.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.free_after: dict[int, list[int]] = {}
        self.restore_before: dict[int, list[int]] = {}
        self.moves = _Moves(plan.offloads)
        for eviction in plan.evictions:
            if eviction.how is Restore.OFFLOAD:
                continue
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
        self.before: dict[int, list[Step]] = {}  # step -> what moves just before it
        self.after: dict[int, list[Step]] = {}  # step -> what is launched when it and its frees are done
        self.away: dict[int, list[int]] = {}  # storage that is on the host -> the values that come back with it
        self.coming: set[int] = set()  # those of them whose way back has begun

    def walk(self) -> None:
        graph, available, last_use = self.graph, self.available, self.last_use
        reads, makes, runs = graph.reads, graph.makes, self.runs
        is_available = available.__getitem__
        for op in graph.ops:
            t = op.id
            restored: list[int] = []
            if t in self.moves.boundaries:
                self._move(t)
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
            if t in self.moves.out_after:
                self.after[step] = [Launch(COPY_OUT, e.storage) for e in self.moves.out_after[t]]
        for storage, step in enumerate(last_use):
            if step >= 0 and storage not in graph.held_storages:
                self._close(storage)

    # -- to the host and back -------------------------------------------------------------------------------

    def _move(self, op: int) -> None:
        """Free what is gone before `op`, then begin what comes back, then await what is back."""
        steps = self.before.setdefault(len(self.runs), [])
        for storage in self.moves.gone_before.get(op, ()):
            steps += (Wait(COPY_OUT, storage), Free(storage))
            self._leave(storage)
        for storage in self.moves.back_before.get(op, ()):
            steps.append(Launch(COPY_IN, storage))
            self.coming.add(storage)
        for storage in self.moves.restore_before.get(op, ()):
            steps.append(Wait(COPY_IN, storage))
            self._arrive(storage)

    def _leave(self, storage: int) -> None:
        self.away[storage] = [v for v in self.graph.values_in[storage] if self.available[v]]
        for v in self.away[storage]:
            self.available[v] = 0
        self.last_use[storage] = -1
        self.copies.pop(storage, None)  # which were there only while their reruns ran

    def _arrive(self, storage: int) -> None:
        self.coming.discard(storage)
        for v in self.away.pop(storage):
            self.available[v] = 1
        self.last_use[storage] = len(self.runs)

    # -- recomputation --------------------------------------------------------------------------------------

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
            lost = missing.pop()
            self._check_here(lost, before=before)
            producer = graph.values[lost].producer
            if producer is None or producer in chain:
                continue
            op = graph.ops[producer]
            self._check_rerun(op, before=before)
            chain.add(producer)
            missing.extend(v for v in rerun_reads(op) if not available[v])
        return chain

    def _check_here(self, value: int, *, before: Op) -> None:
        if self.graph.values[value].storage in self.away:
            raise PlanError(
                f"{self.graph.values[value].name!r} is wanted before or by op {before.name!r}, while it is on the "
                "host: a plan brings it back before its first reader or rerun"
            )

    def _check_rerun(self, op: Op, *, before: Op) -> None:
        if op.rerun is Rerun.NEVER:
            raise PlanError(
                f"op {op.name!r} would have to be rerun before {before.name!r}, but never may be: {op.never_reason}"
            )
        changed = written_between(self.graph, op, before.id)
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
            if storage in self.away:
                if storage not in self.coming:  # made for its sibling's sake: gone when the op returns
                    self.dies_at.setdefault(step, []).append(storage)
            elif self.last_use[storage] >= 0:
                self.copies.setdefault(storage, []).append(step)
            else:
                self.last_use[storage] = step
                made.append(storage)
        for v in op.outputs:
            self.available[v] = values[v].storage not in self.away
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
            if step in self.before:
                steps += self.before[step]
            into = overwritten(graph, graph.ops[op_id], dying) if in_place and dying else None
            collective = graph.ops[op_id].collective
            if collective is not None and collective.waits:
                steps.append(Wait(_lane(collective.group), collective.storage))
            if code < 0:
                steps.append(Run(op_id, into, RunKind.RERUN))
            elif op_id in self.rng_last_use:
                steps.append(Run(op_id, into, RunKind.ORIGINAL_SAVING_RNG))
            else:
                steps.append(_run(op_id) if into is None else Run(op_id, into))
            if collective is not None and not collective.waits:
                steps.append(Launch(_lane(collective.group), collective.storage, op_id))
            if dying:
                steps.extend([_free(storage) for storage in sorted(dying) if storage != into])
            if step in self.after:
                steps += self.after[step]
        return steps


class _Moves:
    """What a plan moves to the host, by the ops at which it does; in the order in which lanes serve it."""

    def __init__(self, offloads: Sequence[Eviction]) -> None:
        self.out_after: dict[int, list[Eviction]] = {}
        self.gone_before: dict[int, list[int]] = {}
        self.back_before: dict[int, list[int]] = {}
        self.restore_before: dict[int, list[int]] = {}
        for e in sorted(offloads, key=lambda e: (e.gone_before or 0, e.storage)):  # what is to be gone first goes first
            assert e.gone_before is not None
            self.out_after.setdefault(e.free_after, []).append(e)
            self.gone_before.setdefault(e.gone_before, []).append(e.storage)
        for e in sorted(offloads, key=lambda e: (e.restore_before or 0, e.storage)):  # what is wanted first comes first
            assert e.back_before is not None
            assert e.restore_before is not None
            self.back_before.setdefault(e.back_before, []).append(e.storage)
            self.restore_before.setdefault(e.restore_before, []).append(e.storage)
        self.boundaries = {*self.gone_before, *self.back_before, *self.restore_before}


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
