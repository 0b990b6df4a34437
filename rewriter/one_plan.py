"""One plan for ranks that train together: rank 0 makes it, and each judges it for its own sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from planner.ir import Graph
from planner.overlap import overlapping, reordered
from planner.schedule import Schedule
from planner.simulator import simulate
from planner.solve import Problem, Solution, solve, without_plan
from rewriter.agreement import Ranks
from rewriter.given_plan import GivenPlan

ANOTHER_SEQUENCE = "the ranks would communicate in another order, so that nothing was run; please report it"


def answer_of_all(ranks: Ranks, problem: Problem, answer: Callable[[Problem], Solution]) -> Solution:
    """Rank 0's answer to a problem that is the same on all ranks."""
    mine: Solution | None = answer(problem) if ranks.rank == 0 else None
    told = None if mine is None else (mine.strategy, mine.plan, mine.solve_s, mine.reason)
    first = ranks.gathered("asking rank 0 for the plan", told)[0]
    assert first is not None
    strategy, plan, solve_s, reason = first
    if plan is not None:
        return replace(solve(problem, GivenPlan(plan, bound_holds=True), label=strategy), solve_s=solve_s)
    return without_plan(problem, strategy, reason, solve_s=solve_s, solve_cpu_s=0.0)


def for_own_sizes(solution: Solution, graph: Graph) -> Solution:
    """The plan of all ranks, judged for one rank's graph."""
    assert solution.plan is not None
    own = replace(solution.problem, graph=graph)
    judged = solve(own, GivenPlan(solution.plan, bound_holds=True), label=solution.strategy)
    return replace(judged, solve_s=solution.solve_s)


def overlapped(solution: Solution, common: Graph, *, barriers: Collection[int] = ()) -> Solution:
    """The same plan with communication beside ops, as far as the largest of all ranks allows it: `common`.

    Every rank finds the same order, since all have the same `common`. Nothing is moved across `barriers`, ops.
    """
    if solution.schedule is None or solution.plan is None or not common.wait_of:
        return solution
    problem = replace(solution.problem, graph=common)
    schedule = problem.schedule(solution.plan)
    order = overlapping(common, schedule, budget_bytes=problem.budget_bytes, barriers=barriers)
    if order is None or _holds_too_much(problem, reordered(common, schedule, order)):
        return solution
    own = reordered(solution.problem.graph, solution.schedule, order)
    return replace(solution, schedule=own, timeline=simulate(solution.problem.graph, own))


def _holds_too_much(problem: Problem, schedule: Schedule) -> bool:
    found = problem.held(schedule) if problem.most_reserved_bytes is not None else None
    return found is not None and found.reserved_bytes > (problem.most_reserved_bytes or 0)
