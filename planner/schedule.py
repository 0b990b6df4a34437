"""The exact steps that a plan means.

`lower` is the only place where a plan becomes a sequence of steps. The simulator scores that sequence and the
rewriter replays it, so what was scored is what runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import assert_never

from planner.analysis import rerun_reads, written_between
from planner.errors import PlanError
from planner.ir import Graph, Op, Rerun
from planner.plan import Plan, check_plan


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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The steps that run an op, in order."""
        return tuple(step for step in self.steps if isinstance(step, Run))

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
        case _:
            assert_never(step)


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
