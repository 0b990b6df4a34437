"""Plans within what the allocator of a GPU may hold, found by asking for plans within less live memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.plan import Plan
from planner.solve import Problem, Solution, Status
from planner.units import MOST_BYTES, human_bytes

MOST_TRIES = 8  # plans that are asked for
CLOSE = 0.005  # of the limit: a plan that uses so much more of it is not searched for


def solved_within_reserved(problem: Problem, solved: Callable[[Problem], Solution], *, most_bytes: int) -> Solution:
    """The cheapest of several plans that the allocator holds in `most_bytes`; if none, the one that it holds in least.

    `solved` answers a problem without a limit on reserved memory. What lies unused between blocks shows only when a
    plan is there, so plans are asked for with less live memory, then with more again. An allocator gives memory up in
    whole segments, so that what a plan is over by says little: each next one is asked for in less by twice as much.
    """
    deadline = time.perf_counter() + problem.time_limit_s
    tries: list[Solution] = []
    asked: int | None = min(problem.budget_bytes, most_bytes)
    while asked is not None and len(tries) < MOST_TRIES and (not tries or time.perf_counter() < deadline):
        share = max(0.0, deadline - time.perf_counter()) / 2
        within = replace(problem, budget_bytes=asked, most_reserved_bytes=None, time_limit_s=share)
        tries.append(solved(within))
        asked = _next_live_bytes(tries, most_bytes)
    return _of_the_tries(problem, tries, most_bytes)


def _next_live_bytes(tries: Sequence[Solution], most_bytes: int) -> int | None:
    """The live memory to ask for next; None where nothing better is to be expected."""
    met = [t for t in tries if t.status is Status.FITS]
    failed = [t.problem.budget_bytes for t in tries if t.status is not Status.FITS]
    within = [_peak(t) for t in met if _reserved(t) <= most_bytes]
    if not within and not failed:
        last = tries[-1]
        less = _peak(last) - (_reserved(last) - most_bytes) * 2 ** (len(tries) - 1)
        start = last.problem.graph.start_bytes
        return max(less, start) if _peak(last) > start else None
    low = max(within or failed)
    above = [_peak(t) for t in met if _peak(t) > low and _reserved(t) > most_bytes]
    if not above or min(above) - low < CLOSE * most_bytes:
        return None
    return (low + min(above)) // 2


def _of_the_tries(problem: Problem, tries: Sequence[Solution], most_bytes: int) -> Solution:
    """The best of them, as an answer to the whole problem. What the first one proved holds for all less memory."""
    fitting = [t for t in tries if t.status is Status.FITS and _reserved(t) <= most_bytes]
    best = min(fitting, key=lambda t: t.overhead or 0.0) if fitting else min(tries, key=_reserved)
    whole = replace(
        best,
        problem=problem,
        solve_s=math.fsum(t.solve_s for t in tries),
        solve_cpu_s=math.fsum(t.solve_cpu_s for t in tries),
    )
    if best.plan is None or best.timeline is None:
        return whole
    first = tries[0].plan or Plan()
    plan = replace(best.plan, lower_bound_us=first.lower_bound_us, bound_class=first.bound_class)
    reason = f"{human_bytes(_reserved(best))} reserved, of at most {human_bytes(most_bytes)}; {best.reason}"
    return replace(whole, plan=plan, status=Status.FITS if fitting else Status.OVER_BUDGET, reason=reason)


def _peak(solution: Solution) -> int:
    return 0 if solution.timeline is None else solution.timeline.peak_bytes


def _reserved(solution: Solution) -> int:
    """What is held for a solution; more than anything where there is no plan."""
    return MOST_BYTES if solution.held is None else solution.held.reserved_bytes
