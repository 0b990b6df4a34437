"""The whole trade-off of a graph: overhead against peak, with the bound under it; and the budget for an overhead."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import BudgetError, NoPlan
from planner.ir import Graph
from planner.plan import Plan, recompute_once
from planner.solve import Problem
from strategies.ilp.search import Ilp, Search
from strategies.ilp.shared_work import Work
from strategies.ilp.smallest import smallest_peak
from strategies.mutwo.greedy import curve

BUDGETS = tuple(f"{percent}%" for percent in range(100, 5, -5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the curve. `bound` is the least overhead that any plan recomputing once can have there.

    `plan` is the best one for the budget; None where nothing was found that fits. `impossible` says that nothing can.
    `cut_off`: the time limit ended the search, so that another run may differ.
    """

    budget_bytes: int
    plan: Plan | None
    peak_bytes: int | None
    overhead: float | None
    bound: float
    impossible: bool
    who: str
    solve_s: float
    cut_off: bool = False


def trade_off_curve(
    graph: Graph,
    budgets: Sequence[str | int] = BUDGETS,
    *,
    options: Ilp | None = None,
    time_limit_s: float = 5.0,
    in_place: bool = True,
) -> list[Point]:
    """The curve at `budgets`, from the largest to the smallest; `time_limit_s` is for each of them.

    Where memory must be counted carries over from one budget to the next. So does the bound, since less memory
    never takes less time; and a plan for less memory that takes less time stands for both.
    """
    options = options if options is not None else Ilp()
    problem = Problem(graph=graph, budget_bytes=graph.start_bytes, in_place=in_place)
    peak, work, bound_us = problem.unplanned.peak_bytes, Work(problem), 0.0
    sizes = sorted({Problem.of(graph, b, in_place=in_place).budget_bytes for b in budgets}, reverse=True)
    points: list[Point] = []
    for budget in sizes:
        limited = Problem(graph=graph, budget_bytes=budget, time_limit_s=time_limit_s, in_place=in_place)
        if points and points[-1].impossible:
            points.append(_point(limited, None, bound_us, impossible=True, who="", started=time.perf_counter()))
            continue
        started = time.perf_counter()
        search = Search(limited, options, work=work, bound_us=bound_us, smallest=False)
        plan = _run(search)
        bound_us = max(bound_us, search.bound_us)
        who = search.best.who if search.best is not None else "keeping everything" if peak <= budget else ""
        fits = plan if who else None
        point = _point(limited, fits, bound_us, impossible=search.impossible, who=who, started=started)
        points.append(replace(point, cut_off=search.cut_off))
    return _monotone(points)


def _run(search: Search) -> Plan | None:
    try:
        return search.run()
    except NoPlan:  # a point without a plan says so
        return None


def _point(
    problem: Problem, plan: Plan | None, bound_us: float, *, impossible: bool, who: str, started: float
) -> Point:
    timeline = problem.timeline(plan) if plan is not None else None
    return Point(
        budget_bytes=problem.budget_bytes,
        plan=plan,
        peak_bytes=timeline.peak_bytes if timeline is not None else None,
        overhead=timeline.overhead if timeline is not None else None,
        bound=bound_us / problem.graph.time_us if problem.graph.time_us else 0.0,
        impossible=impossible,
        who=who,
        solve_s=time.perf_counter() - started,
    )


def _monotone(points: list[Point]) -> list[Point]:
    """The same points, each with the best plan of all that need no more than its budget."""
    best: Point | None = None
    result: list[Point] = []
    for point in reversed(points):
        if best is None or (point.overhead is not None and point.overhead <= (best.overhead or 0.0)):
            best = point if point.overhead is not None else best
        result.append(point if best is None or point.overhead is None else _taking(point, best))
    return result[::-1]


def _taking(point: Point, best: Point) -> Point:
    return replace(point, plan=best.plan, peak_bytes=best.peak_bytes, overhead=best.overhead, who=best.who)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The least memory found for an overhead, and the peak below which no plan recomputing once has that overhead."""

    plan: Plan
    peak_bytes: int
    overhead: float
    floor_bytes: int


def _greedy_within(graph: Graph, limit_us: float, *, in_place: bool, deadline: float) -> Plan:
    """The plan of `mutwo` with the smallest peak that recomputes for at most `limit_us`."""
    prefixes = curve(graph, in_place=in_place, deadline=deadline)
    best = [p for p in prefixes if p.recompute_us <= limit_us][-1]  # the empty one takes no time
    return recompute_once(graph, best.dropped) if best.dropped else Plan()


def budget_for(
    graph: Graph,
    *,
    overhead: float = 0.05,
    options: Ilp | None = None,
    time_limit_s: float = 10.0,
    in_place: bool = True,
) -> LeastMemory:
    """The least memory in which the step is at most `overhead` slower. SolverError if the solver is missing."""
    if not 0 <= overhead < math.inf:
        raise BudgetError(f"an overhead of {overhead}: give a share of the step's time, such as 0.05")
    options = options if options is not None else Ilp()
    problem = Problem(graph=graph, budget_bytes=graph.start_bytes, time_limit_s=time_limit_s, in_place=in_place)
    deadline = time.perf_counter() + time_limit_s
    limit_us = overhead * graph.time_us
    plans = [_greedy_within(graph, limit_us, in_place=in_place, deadline=deadline)]
    found = smallest_peak(Work(problem), options.solver, deadline=deadline, max_us=limit_us)
    if found.state is not None:
        plans.append(found.state.plan())
    plan, timeline = min(((p, problem.timeline(p)) for p in plans), key=lambda judged: judged[1].peak_bytes)
    return LeastMemory(
        plan=plan,
        peak_bytes=timeline.peak_bytes,
        overhead=timeline.overhead,
        floor_bytes=min(found.floor_bytes, timeline.peak_bytes),
    )
