"""The only interpreter of a schedule: what every step makes, frees and holds in memory.

`walk` yields one event per step, for whoever reads a schedule. A reader that only adds up memory uses what all events
have in common; one that asks what was done matches on the event, with `assert_never`, so that a new kind of step makes
the type checker name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from planner.analysis import rerun_reads
from planner.errors import PlanError
from planner.ir import Graph, Op
from planner.schedule import Free, Run, RunKind, Schedule, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What every step does to memory: `made` and `freed` are the storages that became resident, or ended.

    `live_bytes` are resident once the step is done. `transient_bytes` are there only during it: a workspace, a second
    copy of what is resident, a generator's own state while another is replayed.
    """

    start_us: float
    made: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    live_bytes: int
    transient_bytes: int = 0

    @property
    def during_bytes(self) -> int:
        """Bytes live while the step is taken."""
        return self.live_bytes + self.transient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(Change):
    """An op ran; where it ran in place, `freed` is what it wrote its output over."""

    step: Run
    op: Op

    @property
    def again(self) -> bool:
        """Whether it ran before."""
        return self.step.kind is RunKind.RERUN

    @property
    def end_us(self) -> float:
        return self.start_us + self.op.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(Change):
    """A storage was let go of."""

    step: Free


Event = Ran | Freed


def walk(graph: Graph, schedule: Schedule) -> Iterator[Event]:
    """One event per step; PlanError if a run lacks an input or a Free names what is not resident."""
    memory, clock_us = Memory(graph), 0.0
    for step in schedule.steps:
        memory.take(step)
        match step:
            case Run():
                op = graph.ops[step.op]
                yield Ran(
                    step=step,
                    op=op,
                    start_us=clock_us,
                    made=tuple(memory.made),
                    freed=() if step.into is None else (step.into,),
                    live_bytes=memory.live_bytes,
                    transient_bytes=memory.transient_bytes,
                )
                clock_us += op.time_us
            case Free():
                yield Freed(step=step, start_us=clock_us, freed=(step.storage,), live_bytes=memory.live_bytes)
            case _:
                assert_never(step)


class Memory:
    """What is resident while steps are taken one by one. `simulate` uses it as it is: events would slow it down."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nbytes = [storage.nbytes for storage in graph.storages]
        self.resident = bytearray(len(graph.storages))
        for value in graph.values:
            if value.producer is None:
                self.resident[value.storage] = 1
        self.live_bytes = graph.start_bytes
        self.transient_bytes = 0  # of the step just taken
        self.made: list[int] = []  # by the run just taken
        self.original_us = 0.0
        self.recompute_us = 0.0
        self.reruns = 0

    def take(self, step: Step) -> int:
        """Take one step and return the bytes live during it."""
        match step:
            case Run():
                return self._run(step)
            case Free():
                self.transient_bytes = 0
                self._release(step.storage)
                return self.live_bytes
            case _:
                assert_never(step)

    def _release(self, storage: int) -> None:
        if not self.resident[storage]:
            raise PlanError(f"schedule frees {self.graph.storage_names[storage]!r}, which is not resident")
        self.resident[storage] = 0
        self.live_bytes -= self.nbytes[storage]

    def _hold(self, storage: int) -> None:
        self.resident[storage] = 1
        self.live_bytes += self.nbytes[storage]
        self.made.append(storage)

    def _run(self, run: Run) -> int:
        graph, resident = self.graph, self.resident
        op = graph.ops[run.op]
        again = run.kind is RunKind.RERUN
        needs = self._rerun_needs(op) if again else graph.reads[run.op]
        if not all(map(resident.__getitem__, needs)):
            lost = next(graph.storage_names[s] for s in needs if not resident[s])
            raise PlanError(f"schedule runs {op.name!r} while {lost!r} is not resident")
        if again:
            self.recompute_us += op.time_us
            self.reruns += 1
        else:
            self.original_us += op.time_us
        if run.into is not None:
            self._release(run.into)
        self.made = []
        transient = op.workspace_bytes
        for storage in graph.makes[run.op]:
            if resident[storage]:
                transient += self.nbytes[storage]  # a rerun's second copy, dropped when the op returns
            else:
                self._hold(storage)
        if op.rng_state is not None and again:
            transient += self.nbytes[op.rng_state]  # where the generator stands now, to be put back after the replay
        elif op.rng_state is not None and run.kind is RunKind.ORIGINAL_SAVING_RNG:
            self._hold(op.rng_state)
        self.transient_bytes = transient
        return self.live_bytes + transient

    def _rerun_needs(self, op: Op) -> tuple[int, ...]:
        values = self.graph.values
        state = () if op.rng_state is None else (op.rng_state,)
        return (*(values[v].storage for v in rerun_reads(op)), *state)
