"""Measuring a step before its plan: as it is where that fits, under a provisional plan where it does not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import strategies
from planner.ir import Graph
from planner.schedule import Schedule
from planner.simulator import unplanned
from planner.solve import Problem, solve
from planner.units import human_bytes
from profiler.estimating.roofline import with_roofline_times
from profiler.measuring.memory import OutOfMemory, guarded, usable_bytes
from profiler.measuring.op_times import Measured, measure
from profiler.tracing.whole_step import TracedStep
from profiler.workload import device_of
from rewriter.agreement import ALONE, Ranks
from rewriter.budgets import OverBudget, over_budget
from rewriter.moving import HostAccess, reserve

# Of what the budget lets a step add: how much a provisional plan may take. The rest is for the workspaces, which nobody
# knows before they were measured; where it is not enough, the next is tried.
SHARES = (0.85, 0.65, 0.45, 0.3)
SECONDS = 5.0  # for each provisional plan
STRATEGY = "auto"


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A measured step. `as_it_is` says whether it was measured unplanned, so that it can be run so too."""

    measured: Measured
    as_it_is: bool


def measure_within(
    traced: TracedStep,
    batch: Any,
    *,
    limit_bytes: int,
    show_progress: bool,
    ranks: Ranks = ALONE,
    access: HostAccess | None = None,
) -> Ready:
    """The step with measured times and workspaces, though its unplanned peak be larger than the memory there is.

    `limit_bytes` is the budget. With `access` a provisional plan may move tensors to the host, so that in the end only
    one op's own have to fit (μ-TWO, Algorithm A). OverBudget if it runs out of memory under every provisional plan
    within it. Several ranks measure it in the same way; where it does not fit all of them as it is, it is refused.
    """
    device = device_of(traced.convention.model)
    needed, there = needed_bytes(traced.graph, device), usable_bytes(device)
    there_on_all = all(ranks.gathered("asking for memory", needed <= there))
    if not there_on_all and ranks.size > 1:
        raise OutOfMemory(
            f"measuring the step as it is needs {human_bytes(needed)} more on rank {ranks.rank}, where "
            f"{human_bytes(there)} can be had, or does not fit another rank; provisional plans are not made on several "
            "ranks: a smaller batch would help"
        )
    if there_on_all:
        unplanned = _measured(traced, batch, None, show_progress)
        if unplanned is not None:
            return Ready(measured=unplanned, as_it_is=True)
    warnings.warn(
        f"the step as it is needs {human_bytes(needed)} more and {human_bytes(there)} can be had on {device}: its ops "
        "are measured under a provisional plan, made from estimated times",
        UserWarning,
        stacklevel=4,
    )
    for schedule in provisional_schedules(traced, limit_bytes, access):
        planned = _measured(traced, batch, schedule, show_progress, access)
        if planned is not None:
            return Ready(measured=planned, as_it_is=False)
    raise OverBudget(
        f"out of memory on {device} while measuring the step, also under provisional plans for "
        f"{human_bytes(limit_bytes)} and less; {human_bytes(usable_bytes(device))} can be had now: a smaller batch "
        "or a smaller budget would help"
    )


def fits_as_it_is(traced: TracedStep) -> bool:
    """Whether there is memory for the unplanned step, by what it needs at least."""
    device = device_of(traced.convention.model)
    return needed_bytes(traced.graph, device) <= usable_bytes(device)


def needed_bytes(graph: Graph, device: torch.device) -> int:
    """What measuring the unplanned step allocates at least: what the step adds, and copies of what it changes.

    The copies lie in main memory, so they count on the CPU only.
    """
    added = unplanned(graph).above_start_bytes
    return added + (graph.start_bytes if device.type == "cpu" else 0)


def provisional_schedules(traced: TracedStep, limit_bytes: int, access: HostAccess | None = None) -> Iterator[Schedule]:
    """Schedules from the roofline's times within the budget, each for less memory than the one before.

    OverBudget where already the tensors alone, without any workspace, exceed it.
    """
    graph, last_bytes = with_roofline_times(traced), limit_bytes + 1
    for share in SHARES:
        budget = graph.start_bytes + int(share * (limit_bytes - graph.start_bytes))
        problem = Problem(graph=graph, budget_bytes=budget, time_limit_s=SECONDS)
        problem = problem if access is None else access.offered_in(problem)
        solution = solve(problem, strategies.make(STRATEGY), label=STRATEGY)
        assert solution.timeline is not None, "it always has the plans of its seeds"
        assert solution.schedule is not None
        if share == SHARES[0] and solution.timeline.peak_bytes > limit_bytes:
            raise over_budget(solution, limit_bytes, 0)
        if solution.timeline.peak_bytes < last_bytes:
            last_bytes = solution.timeline.peak_bytes
            yield solution.schedule


def _measured(
    traced: TracedStep,
    batch: Any,
    schedule: Schedule | None,
    show_progress: bool,
    access: HostAccess | None = None,
) -> Measured | None:
    """The measured step; None if memory ran out, with everything let go."""
    host = None if access is None else access.host
    if host is not None and schedule is not None:
        reserve(host, traced.graph, schedule)
    try:
        return guarded(
            "measuring the step",
            lambda: measure(traced, batch, schedule=schedule, show_progress=show_progress, host=host),
        )
    except OutOfMemory:
        return None
