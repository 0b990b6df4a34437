"""What makes a peak, and why moving tensors to the host does not lower it."""

from __future__ import annotations

from planner.analysis import floor, liveness, movable
from planner.host_link import HostLink
from planner.ir import Graph
from planner.schedule import Run, RunKind, Schedule
from planner.simulator import Timeline
from planner.units import human_bytes
from planner.walk import walk

MOST_NAMED = 3


def why_nothing_moves(
    graph: Graph, schedule: Schedule, timeline: Timeline, link: HostLink, *, host_budget_bytes: int | None
) -> str:
    """In one phrase, why a plan with a host link moves nothing: no room there, nothing gained, or too slow a link."""
    smallest = min((graph.storages[s].nbytes for s in movable(graph)), default=None)
    if smallest is None:
        return "no activation idles between forward and backward"
    if host_budget_bytes is not None and smallest > host_budget_bytes:
        room = human_bytes(host_budget_bytes)
        return f"the host may hold {room}, and the smallest activation that idles has {human_bytes(smallest)}"
    idle = idle_at_peak(graph, schedule, timeline)
    if not idle:
        return f"it would not lower the peak, which lies {where_the_peak_is(graph, schedule, timeline)}"
    room = too_little_room(graph, idle, host_budget_bytes)
    return f"nothing was found that would be cheaper over {link}{' where ' if room else ''}{room}"


def too_little_room(graph: Graph, idle: tuple[int, ...], host_budget_bytes: int | None) -> str:
    """What idles at a peak beside what the host may hold of it; "" where it may hold all of that."""
    nbytes = sum(graph.storages[s].nbytes for s in idle)
    if host_budget_bytes is None or nbytes <= host_budget_bytes:
        return ""
    return (
        f"{human_bytes(nbytes)} idle at the peak and the host may hold {human_bytes(host_budget_bytes)} (host_budget)"
    )


def where_the_peak_is(graph: Graph, schedule: Schedule, timeline: Timeline) -> str:
    """The op at the peak, whether it is recomputation, and the largest of what it works on."""
    run = _run_at(schedule, timeline.peak_step)
    if run is None:
        return "in no op"
    kind = "in the recomputation of op" if run.kind is RunKind.RERUN else "in op"
    touched = {*graph.reads[run.op], *graph.makes[run.op]} - _before(graph)
    sized = sorted(touched, key=lambda s: (-graph.storages[s].nbytes, s))[:MOST_NAMED]
    names = ", ".join(f"{graph.storage_names[s]} {human_bytes(graph.storages[s].nbytes)}" for s in sized)
    own = f" with its own {names}" if names else ""
    lowest = floor(graph, moving=True)
    least = f"; op {lowest.op!r} alone needs {human_bytes(lowest.nbytes)}, wherever the rest is"
    return f"{kind} {graph.ops[run.op].name!r}{own}{least}"


def idle_at_peak(graph: Graph, schedule: Schedule, timeline: Timeline) -> tuple[int, ...]:
    """The movable storages that lie idle at the peak: what moving could take away from it."""
    resident: set[int] = set()
    for position, event in enumerate(walk(graph, schedule)):
        resident = (resident | set(event.made)) - set(event.freed)
        if position >= timeline.peak_step:
            break
    run = _run_at(schedule, timeline.peak_step)
    stage = _stage_of(schedule, timeline.peak_step)
    touched = set() if run is None else {*graph.reads[run.op], *graph.makes[run.op]}
    idle = []
    for storage in movable(graph):
        live = liveness(graph)[storage]
        assert live.idle_after is not None
        assert live.idle_until is not None
        if storage in resident - touched and live.idle_after < stage < live.idle_until:
            idle.append(storage)
    return tuple(idle)


def _before(graph: Graph) -> set[int]:
    return {v.storage for v in graph.values if v.producer is None}


def _run_at(schedule: Schedule, position: int) -> Run | None:
    """The run at a step, or the first after it."""
    return next((step for step in schedule.steps[position:] if isinstance(step, Run)), None)


def _stage_of(schedule: Schedule, position: int) -> int:
    """The op of the step itself that a run at `position` is, or is recomputation for."""
    runs = (step for step in schedule.steps[position:] if isinstance(step, Run) and step.kind is not RunKind.RERUN)
    return next((run.op for run in runs), -1)
