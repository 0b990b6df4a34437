"""The one judge: exact bytes and time of a Schedule, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import PlanError
from planner.ir import Graph, Op, Role
from planner.plan import rerun_reads
from planner.schedule import Free, Run, RunKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a schedule costs.

    `bytes_at[i]` is what is live during step i: for a Run its inputs, outputs and workspace with everything
    else that is resident; for a Free what remains. `peak_by_role` splits the peak; workspaces count as TEMP.
    """

    bytes_at: tuple[int, ...]
    start_bytes: int
    peak_bytes: int
    peak_step: int
    peak_by_role: tuple[tuple[Role, int], ...]
    time_us: float
    recompute_us: float
    reruns: int

    @property
    def base_us(self) -> float:
        """Time of the step without any recomputation."""
        return self.time_us - self.recompute_us

    @property
    def overhead(self) -> float:
        """Extra time as a fraction of the step without recomputation."""
        return self.recompute_us / self.base_us if self.base_us else 0.0

    @property
    def above_start_bytes(self) -> int:
        """What the step adds at its peak to what was live before it."""
        return self.peak_bytes - self.start_bytes


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Walk the schedule; PlanError if a run lacks an input or a Free names what is not resident."""
    walk = _Walk(graph)
    bytes_at = [walk.step(step) for step in schedule.steps]
    peak = max(bytes_at, default=graph.start_bytes)
    peak_step = bytes_at.index(peak) if bytes_at else 0
    return Timeline(
        bytes_at=tuple(bytes_at),
        start_bytes=graph.start_bytes,
        peak_bytes=peak,
        peak_step=peak_step,
        peak_by_role=_roles_at(graph, schedule, peak_step),
        time_us=walk.original_us + walk.recompute_us,
        recompute_us=walk.recompute_us,
        reruns=walk.reruns,
    )


class _Walk:
    """What is resident after each step of a schedule."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.resident = bytearray(len(graph.storages))
        for value in graph.values:
            if value.producer is None:
                self.resident[value.storage] = 1
        self.nbytes = [storage.nbytes for storage in graph.storages]
        self.live_bytes = graph.start_bytes
        self.original_us = 0.0
        self.recompute_us = 0.0
        self.reruns = 0
        self.transient_bytes = 0  # of the step just taken: workspace, and second copies of what is resident

    def step(self, step: Run | Free) -> int:
        """Take one step and return the bytes live during it."""
        self.transient_bytes = 0
        if type(step) is Free:
            self._release(step.storage)
            return self.live_bytes
        return self._run(step)  # type: ignore[arg-type]  # Step is Run | Free

    def _release(self, storage: int) -> None:
        if not self.resident[storage]:
            raise PlanError(f"schedule frees {self.graph.storage_names[storage]!r}, which is not resident")
        self.resident[storage] = 0
        self.live_bytes -= self.nbytes[storage]

    def _run(self, run: Run) -> int:
        graph, resident, nbytes = self.graph, self.resident, self.nbytes
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
        transient = op.workspace_bytes
        for storage in graph.makes[run.op]:
            if resident[storage]:
                transient += nbytes[storage]  # a rerun's second copy, dropped when the op returns
            else:
                resident[storage] = 1
                self.live_bytes += nbytes[storage]
        if again and op.rng_state is not None:
            transient += nbytes[op.rng_state]  # where the generator stands now, to be put back after the replay
        if run.kind is RunKind.ORIGINAL_SAVING_RNG and op.rng_state is not None:
            resident[op.rng_state] = 1
            self.live_bytes += nbytes[op.rng_state]
        self.transient_bytes = transient
        return self.live_bytes + transient

    def _rerun_needs(self, op: Op) -> tuple[int, ...]:
        values = self.graph.values
        state = () if op.rng_state is None else (op.rng_state,)
        return (*(values[v].storage for v in rerun_reads(op)), *state)


def _roles_at(graph: Graph, schedule: Schedule, last_step: int) -> tuple[tuple[Role, int], ...]:
    walk = _Walk(graph)
    for step in schedule.steps[: last_step + 1]:
        walk.step(step)
    totals = dict.fromkeys(Role, 0)
    for storage in graph.storages:
        if walk.resident[storage.id]:
            totals[storage.role] += storage.nbytes
    totals[Role.TEMP] += walk.transient_bytes
    return tuple((role, total) for role, total in totals.items() if total)


def bytes_by_role(graph: Graph, schedule: Schedule) -> dict[Role, list[int]]:
    """Per role, the live bytes at every step; they add up to `Timeline.bytes_at`."""
    walk, before = _Walk(graph), bytearray(len(graph.storages))
    totals = dict.fromkeys(Role, 0)
    for storage in graph.storages:
        if walk.resident[storage.id]:
            totals[storage.role] += storage.nbytes
    before[:] = walk.resident
    series: dict[Role, list[int]] = {role: [] for role in Role}
    for step in schedule.steps:
        walk.step(step)
        for storage_id in _touched(graph, step):
            change = walk.resident[storage_id] - before[storage_id]
            totals[graph.storages[storage_id].role] += change * graph.storages[storage_id].nbytes
            before[storage_id] = walk.resident[storage_id]
        for role in Role:
            series[role].append(totals[role] + (walk.transient_bytes if role is Role.TEMP else 0))
    return {role: values for role, values in series.items() if any(values)}


def _touched(graph: Graph, step: Run | Free) -> list[int]:
    if isinstance(step, Free):
        return [step.storage]
    state = graph.ops[step.op].rng_state
    extra = [s for s in (step.into, state) if s is not None]
    return [*graph.makes[step.op], *extra]
