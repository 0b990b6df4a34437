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
from planner.errors import LinkError, PlanError
from planner.host_link import HostLink
from planner.ir import Graph, Op
from planner.schedule import COPY_IN, COPY_OUT, Free, Lane, Launch, Run, RunKind, Schedule, Step, Wait, Work


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
    def took_us(self) -> float:
        """What it took by itself: a wait for a collective is a step of its own."""
        return 0.0 if self.op.waits else self.op.time_us

    @property
    def end_us(self) -> float:
        return self.start_us + self.took_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed(Change):
    """A storage was let go of."""

    step: Free


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Change):
    """Work began to wait in its lane; `made` is what it writes to. It is at work from `busy_us` to `done_us`."""

    step: Launch
    busy_us: float
    done_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited(Change):
    """Work was waited for, for as long as it still took."""

    step: Wait
    stall_us: float


Event = Ran | Freed | Launched | Waited


def walk(graph: Graph, schedule: Schedule) -> Iterator[Event]:
    """One event per step; PlanError if a run lacks an input or a Free names what is not resident."""
    memory = Memory(graph, schedule.link)
    for step in schedule.steps:
        clock_us = memory.clock_us
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
            case Free():
                yield Freed(step=step, start_us=clock_us, freed=(step.storage,), live_bytes=memory.live_bytes)
            case Launch():
                yield Launched(
                    step=step,
                    start_us=clock_us,
                    made=(step.storage,) if step.lane.work is Work.COPY_IN else (),
                    live_bytes=memory.live_bytes,
                    busy_us=memory.busy_us,
                    done_us=memory.done_us[step.lane, step.storage],
                )
            case Wait():
                stall_us = memory.clock_us - clock_us
                yield Waited(step=step, start_us=clock_us, live_bytes=memory.live_bytes, stall_us=stall_us)
            case _:
                assert_never(step)


class Memory:
    """What is resident while steps are taken one by one. `simulate` uses it as it is: events would slow it down.

    Its bytes, on the device and on the host, follow from the order of steps alone. The clock of the ops goes on with
    every run; a lane's clock with every piece of its work; a wait sets the first to the end of what it waits for.
    """

    def __init__(self, graph: Graph, link: HostLink | None = None) -> None:
        self.graph = graph
        self.link = link
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
        self.stall_us = 0.0
        self.clock_us = 0.0
        self.busy_us = 0.0  # when the work just launched begins
        self.lane_us: dict[Lane, float] = {}  # when a lane is free
        self.done_us: dict[tuple[Lane, int], float] = {}  # when work that was launched and not waited for is done
        self.on_host: set[int] = set()  # what was copied out whole, and is not back
        self.host_bytes = 0
        self.moved_bytes = 0  # out, since the step began
        self.took_us: dict[tuple[Lane, int], float] = {}  # of each piece of work, how long it takes on its lane
        self.sent: dict[tuple[Lane, int], tuple[int, ...]] = {}  # what collectives that are under way read or write
        self.scratch: dict[tuple[Lane, int], int] = {}  # bytes that they take for themselves, at a time of their own
        self.left_us = 0.0  # of the collective just waited for
        self.communication_us = 0.0
        self.hidden_us = 0.0  # of that, while ops ran

    def take(self, step: Step) -> int:
        """Take one step and return the bytes live during it."""
        match step:
            case Run():
                return self._run(step)
            case Free():
                self.transient_bytes = 0
                self._release(step.storage)
                return self.live_bytes
            case Launch():
                self._launch(step)
                return self.live_bytes
            case Wait():
                self._wait(step)
                return self.live_bytes
            case _:
                assert_never(step)

    def _release(self, storage: int) -> None:
        if not self.resident[storage]:
            raise PlanError(f"schedule frees {self.graph.storage_names[storage]!r}, which is not resident")
        if self.done_us and self._is_moving(storage):
            raise PlanError(f"schedule frees {self.graph.storage_names[storage]!r} while it is being copied or sent")
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
        if self.done_us:
            self._check_lanes(op, needs, again=again)
        took_us = op.time_us
        if op.collective is not None and op.collective.waits:
            took_us = self.left_us  # for which the step before has waited
        else:
            self.clock_us += took_us
        if again:
            self.recompute_us += took_us
            self.reruns += 1
        else:
            self.original_us += took_us
        if run.into is not None:
            self._release(run.into)
        self.made = []
        transient = op.workspace_bytes
        if self.scratch:
            transient += sum(self.scratch.values())
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

    # -- lanes ------------------------------------------------------------------------------------------------

    def _is_moving(self, storage: int) -> bool:
        copied = (COPY_OUT, storage) in self.done_us or (COPY_IN, storage) in self.done_us
        return copied or self._is_sent(storage)

    def _is_sent(self, storage: int) -> bool:
        return any(storage in sent for sent in self.sent.values())

    def _check_lanes(self, op: Op, needs: tuple[int, ...], *, again: bool) -> None:
        """What is on its way back, or is being made by all ranks, cannot be read; what is sent cannot be written to."""
        names = self.graph.storage_names
        for storage in needs:
            if (COPY_IN, storage) in self.done_us:
                raise PlanError(f"schedule runs {op.name!r} while {names[storage]!r} is still on its way back")
            if any(storage == written for _, written in self.sent):
                raise PlanError(f"schedule runs {op.name!r} while processes still make {names[storage]!r}")
        for v in () if again else op.mutates:
            storage = self.graph.values[v].storage
            if (COPY_OUT, storage) in self.done_us or self._is_sent(storage):
                raise PlanError(
                    f"schedule runs {op.name!r}, which writes to {names[storage]!r}, while it is copied out or sent"
                )

    def _launch(self, launch: Launch) -> None:
        storage, nbytes = launch.storage, self.nbytes[launch.storage]
        self.transient_bytes = 0
        if self._is_moving(storage):
            raise PlanError(f"schedule copies {self.graph.storage_names[storage]!r} while it is being copied")
        match launch.lane.work:
            case Work.COPY_OUT:
                self._begin_out(storage, nbytes)
                took_us = self._host_link().out_us(nbytes)
            case Work.COPY_IN:
                self._begin_in(storage)
                took_us = self._host_link().in_us(nbytes)
            case Work.COLLECTIVE:
                took_us = self._begin_collective(launch)
            case _:
                assert_never(launch.lane.work)
        self.busy_us = max(self.lane_us.get(launch.lane, 0.0), self.clock_us)
        self.lane_us[launch.lane] = self.done_us[launch.lane, storage] = self.busy_us + took_us
        self.took_us[launch.lane, storage] = took_us

    def _begin_out(self, storage: int, nbytes: int) -> None:
        if not self.resident[storage] or storage in self.on_host:
            raise PlanError(
                f"schedule copies {self.graph.storage_names[storage]!r} out, which is not there to be copied"
            )
        self.host_bytes += nbytes
        self.moved_bytes += nbytes

    def _begin_in(self, storage: int) -> None:
        if self.resident[storage] or storage not in self.on_host:
            raise PlanError(f"schedule copies {self.graph.storage_names[storage]!r} back, which is not on the host")
        self.made = []
        self._hold(storage)

    def _begin_collective(self, launch: Launch) -> float:
        op = None if launch.op is None else self.graph.ops[launch.op]
        wait = None if op is None else self.graph.wait_of.get(op.id)
        if op is None or wait is None:
            raise PlanError(
                f"schedule launches {launch.lane.work.value} of {self.graph.storage_names[launch.storage]!r}, which no "
                "op of the graph launches and waits for"
            )
        self.sent[launch.lane, launch.storage] = (launch.storage, *self.graph.reads[op.id])
        if op.workspace_bytes:
            self.scratch[launch.lane, launch.storage] = op.workspace_bytes
        return self.graph.ops[wait].time_us

    def _host_link(self) -> HostLink:
        if self.link is None:
            raise LinkError(f"a schedule of {self.graph.name} copies to the host, and says no link that it goes over")
        return self.link

    def _wait(self, wait: Wait) -> None:
        self.transient_bytes = 0
        done_us = self.done_us.pop((wait.lane, wait.storage), None)
        if done_us is None:
            name = self.graph.storage_names[wait.storage]
            raise PlanError(f"schedule waits for {wait.lane.work.value} of {name!r}, which was not launched")
        left_us = max(0.0, done_us - self.clock_us)
        self.clock_us = max(self.clock_us, done_us)
        match wait.lane.work:
            case Work.COPY_OUT:
                self.stall_us += left_us
                self.on_host.add(wait.storage)
            case Work.COPY_IN:
                self.stall_us += left_us
                self.on_host.discard(wait.storage)
                self.host_bytes -= self.nbytes[wait.storage]
            case Work.COLLECTIVE:
                del self.sent[wait.lane, wait.storage]
                self.scratch.pop((wait.lane, wait.storage), None)
                self.left_us = left_us
                took_us = self.took_us[wait.lane, wait.storage]
                self.communication_us += took_us
                self.hidden_us += max(0.0, took_us - left_us)
            case _:
                assert_never(wait.lane.work)

    def _rerun_needs(self, op: Op) -> tuple[int, ...]:
        values = self.graph.values
        state = () if op.rng_state is None else (op.rng_state,)
        return (*(values[v].storage for v in rerun_reads(op)), *state)
