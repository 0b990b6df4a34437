"""The one judge: exact bytes and time of a Schedule, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir import Graph, Role
from planner.schedule import Schedule, unplanned_schedule
from planner.walk import Memory, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What a schedule costs.

    `bytes_at[i]` is what is live during step i: for a Run its inputs, outputs and workspace with everything
    else that is resident; for other steps what remains. `peak_by_role` splits the peak; workspaces count as TEMP.
    Bytes, those on the host included, follow from the order of the steps; `stall_us`, the time that runs wait for
    copies, from the speed of the link as well.
    """

    bytes_at: tuple[int, ...]
    start_bytes: int
    peak_bytes: int
    peak_step: int
    peak_by_role: tuple[tuple[Role, int], ...]
    time_us: float
    recompute_us: float
    reruns: int
    stall_us: float = 0.0
    moved_bytes: int = 0  # to the host, and back again
    host_peak_bytes: int = 0
    communication_us: float = 0.0  # of all collectives
    hidden_us: float = 0.0  # of that, while ops ran: it costs nothing

    @property
    def extra_us(self) -> float:
        """What the schedule takes beyond the step itself: recomputation, and waiting for copies."""
        return self.recompute_us + self.stall_us

    @property
    def base_us(self) -> float:
        """Time of the step without recomputation and waiting."""
        return self.time_us - self.extra_us

    @property
    def overhead(self) -> float:
        """Extra time as a fraction of the step without recomputation and waiting."""
        return self.extra_us / self.base_us if self.base_us else 0.0

    @property
    def above_start_bytes(self) -> int:
        """What the step adds at its peak to what was live before it."""
        return self.peak_bytes - self.start_bytes


def simulate(graph: Graph, schedule: Schedule) -> Timeline:
    """Walk the schedule; PlanError if a run lacks an input or a Free names what is not resident."""
    memory, bytes_at, host_peak_bytes = Memory(graph, schedule.link), list[int](), 0
    peak, peak_step, at_peak, transient_bytes = -1, 0, bytes(memory.resident), 0
    for position, step in enumerate(schedule.steps):
        nbytes = memory.take(step)
        bytes_at.append(nbytes)
        if memory.host_bytes > host_peak_bytes:
            host_peak_bytes = memory.host_bytes
        if nbytes > peak:
            peak, peak_step = nbytes, position
            at_peak, transient_bytes = bytes(memory.resident), memory.transient_bytes
    return Timeline(
        bytes_at=tuple(bytes_at),
        start_bytes=graph.start_bytes,
        peak_bytes=peak if bytes_at else graph.start_bytes,
        peak_step=peak_step,
        peak_by_role=_by_role(graph, at_peak, transient_bytes),
        time_us=memory.original_us + memory.recompute_us + memory.stall_us,
        recompute_us=memory.recompute_us,
        reruns=memory.reruns,
        stall_us=memory.stall_us,
        moved_bytes=memory.moved_bytes,
        host_peak_bytes=host_peak_bytes,
        communication_us=memory.communication_us,
        hidden_us=memory.hidden_us,
    )


def unplanned(graph: Graph, *, in_place: bool = True) -> Timeline:
    """What the step costs as it is, simulated once a graph."""
    return graph.derived(_unplanned_in_place if in_place else _unplanned)


def _unplanned_in_place(graph: Graph) -> Timeline:
    return simulate(graph, unplanned_schedule(graph))


def _unplanned(graph: Graph) -> Timeline:
    return simulate(graph, unplanned_schedule(graph, in_place=False))


def _by_role(graph: Graph, resident: bytes, transient_bytes: int) -> tuple[tuple[Role, int], ...]:
    totals = dict.fromkeys(Role, 0)
    for storage in graph.storages:
        if resident[storage.id]:
            totals[storage.role] += storage.nbytes
    totals[Role.TEMP] += transient_bytes
    return tuple((role, total) for role, total in totals.items() if total)


def bytes_by_role(graph: Graph, schedule: Schedule) -> dict[Role, list[int]]:
    """Per role, the live bytes at every step; they add up to `Timeline.bytes_at`."""
    totals = dict.fromkeys(Role, 0) | dict(_by_role(graph, bytes(Memory(graph).resident), 0))
    series: dict[Role, list[int]] = {role: [] for role in Role}
    for event in walk(graph, schedule):
        for storage in event.made:
            totals[graph.storages[storage].role] += graph.storages[storage].nbytes
        for storage in event.freed:
            totals[graph.storages[storage].role] -= graph.storages[storage].nbytes
        for role in Role:
            series[role].append(totals[role] + (event.transient_bytes if role is Role.TEMP else 0))
    return {role: values for role, values in series.items() if any(values)}
