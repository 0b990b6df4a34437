"""A graph as one of its schedules runs it, with nothing left to decide.

What a step has begun by one plan, the rest of it can be planned around: unrolled, it is part of a graph like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.analysis import rerun_reads
from planner.ir import Graph, Op, Phase, Rerun, Role, Storage, Value
from planner.schedule import Free, Run, RunKind, Schedule


@dataclass(frozen=True, kw_only=True)
class Unrolled:
    """The new graph, and the values of the old one in it: `before` the op that was asked for ran, and in the end."""

    graph: Graph
    before: dict[int, int]
    after: dict[int, int]


def unrolled(graph: Graph, schedule: Schedule, *, at: int | None = None) -> Unrolled:
    """A graph that, run as it is, takes the memory that `schedule` takes: every rerun is an op, and none may rerun.

    `at` is an op; of schedules that move nothing to the host.
    """
    walk, before = _Unrolling(graph), dict[int, int]()
    steps = schedule.steps
    for step, phase in zip(steps, _phases(graph, schedule), strict=True):
        if isinstance(step, Free):
            walk.resident.discard(step.storage)
        elif isinstance(step, Run):
            if step.op == at:
                before = dict(walk.here)
            walk.run(step, phase)
    return Unrolled(graph=walk.graph(), before=before, after=walk.here)


def _phases(graph: Graph, schedule: Schedule) -> list[Phase]:
    """Per step: where it belongs, a rerun to the op that it is made for."""
    phase, phases = Phase.OPTIMIZER, list[Phase]()
    for step in reversed(schedule.steps):
        if isinstance(step, Run) and step.kind is not RunKind.RERUN:
            phase = graph.ops[step.op].phase
        phases.append(phase)
    return phases[::-1]


@dataclass(frozen=True, slots=True)
class _Made:
    """What a run makes: the values by their old names, and bytes that go with it."""

    outputs: dict[int, int]
    mutates: tuple[int, ...]
    dropped_bytes: int


class _Unrolling:
    """The new graph as it grows, one op for each run of the schedule."""

    def __init__(self, graph: Graph) -> None:
        self.old = graph
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.here: dict[int, int] = {}  # value -> the newest of its copies
        self.storage_of: dict[int, int] = {}
        self.states: dict[int, int] = {}  # storage of a generator's state -> the value that stands for it
        self.resident: set[int] = set()
        for value in graph.values:
            if value.producer is None:
                if value.storage not in self.storage_of:
                    self._new_storage(value.storage)
                base = None if value.base is None else self.here[value.base]
                self.here[value.id] = self._new_value(value, self.storage_of[value.storage], base, producer=None)

    def graph(self) -> Graph:
        """What has been run so far."""
        return replace(
            self.old,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=tuple(self.here[v] for v in self.old.outputs),
        )

    def run(self, step: Run, phase: Phase) -> None:
        old, again = self.old.ops[step.op], step.kind is RunKind.RERUN
        read = tuple(self.here[v] for v in (rerun_reads(old) if again else old.inputs))
        mutates = () if again else tuple(self.here[v] for v in old.mutates)
        made = self._outputs(step, old)
        outputs, workspace = tuple(made.outputs.values()), old.workspace_bytes + made.dropped_bytes
        if old.rng_state is not None and again:
            read += (self.states[old.rng_state],)
            workspace += self.old.storages[old.rng_state].nbytes  # where the generator stands, meanwhile
        elif old.rng_state is not None and step.kind is RunKind.ORIGINAL_SAVING_RNG:
            outputs += (self._state(old.rng_state),)
        self.ops.append(
            replace(
                old,
                id=len(self.ops),
                name=f"{old.name} again ({len(self.ops)})" if again else old.name,
                phase=phase,
                inputs=tuple(dict.fromkeys(read)),
                outputs=outputs,
                mutates=tuple(dict.fromkeys((*mutates, *made.mutates))),
                overwritable=(),
                workspace_bytes=workspace,
                rerun=Rerun.NEVER,
                never_reason="it runs as what has begun already runs it",
                rng_state=None,
            )
        )
        self.here |= made.outputs

    def _outputs(self, step: Run, old: Op) -> _Made:
        """Of a rerun, what is there already is a second copy, and dropped when the op returns."""
        found, mutates, dropped, copies = dict[int, int](), tuple[int, ...](), 0, set[int]()
        if step.into is not None:
            self.resident.discard(step.into)
        for v in old.outputs:
            value = self.old.values[v]
            base = None if value.base is None else found.get(value.base, self.here.get(value.base))
            if value.base is None and value.storage in self.resident:
                dropped += self.old.storages[value.storage].nbytes
                copies.add(value.storage)
            elif value.storage in copies:
                continue
            elif value.base is None and step.into is not None:
                base = next(self.here[i] for i in old.inputs if self.old.values[i].storage == step.into)
                mutates = (base,)
                self.storage_of[value.storage] = self.values[base].storage
            elif value.base is None:
                self._new_storage(value.storage)
            if value.storage in copies:
                continue
            self.resident.add(value.storage)
            found[v] = self._new_value(value, self.storage_of[value.storage], base, producer=len(self.ops))
        return _Made(found, mutates, dropped)

    def _state(self, storage: int) -> int:
        nbytes = self.old.storages[storage].nbytes
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=Role.TEMP))
        made = Value(
            id=len(self.values), name="saved generator state", storage=len(self.storages) - 1, producer=len(self.ops)
        )
        self.values.append(made)
        self.states[storage] = made.id
        return made.id

    def _new_storage(self, storage: int) -> None:
        self.storage_of[storage] = len(self.storages)
        self.storages.append(replace(self.old.storages[storage], id=len(self.storages)))

    def _new_value(self, value: Value, storage: int, base: int | None, *, producer: int | None) -> int:
        new = replace(value, id=len(self.values), storage=storage, base=base, producer=producer)
        self.values.append(new)
        return new.id
