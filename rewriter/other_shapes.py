"""A shape that was not seen before: its times come from one that was measured, its plan from one that was planned."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import strategies
from planner.ir import Graph
from planner.plan import Plan
from planner.scaling import difference, with_times_of
from planner.solve import Problem, Solution, Status, solve
from profiler.measuring.op_times import Measured
from profiler.tracing.whole_step import TracedStep
from rewriter.given_plan import GivenPlan
from rewriter.provisional import Ready, fits_as_it_is

log = logging.getLogger("recompute_planner")

F = TypeVar("F")

# Of a step's time: what planning anew has to promise, to be worth its own.
WORTH_PLANNING = 0.02
QUICK_STRATEGY = "mutwo"  # which says what could be gained

# What a form takes in Python's memory, for each op of its graph: nodes, guards, the rewritten module.
BYTES_AN_OP = 20 * 2**10
MOST_FORMS_BYTES = 2**30
LEAST_FORMS = 8  # are kept whatever they take


def scaled(traced: TracedStep, known: Sequence[Graph]) -> Ready | None:
    """The captured step with times and workspaces of the nearest shape that was measured; None where none is like it.

    Like it means: the same ops on the same tensors, sizes apart.
    """
    alike = [graph for graph in known if not difference(graph, traced.graph)]
    if not alike:
        return None
    size = _size(traced.graph)
    nearest = min(alike, key=lambda graph: abs(math.log(_size(graph) / size)))
    again = replace(traced, graph=with_times_of(traced.graph, nearest))
    log.info("not measured: %s has the ops of a shape that was, and its times by its sizes", traced.graph.name)
    return Ready(measured=Measured(traced=again, stats=()), as_it_is=fits_as_it_is(again))


def _size(graph: Graph) -> int:
    return 1 + sum(storage.nbytes for storage in graph.storages)


def carried_over(problem: Problem, earlier: Sequence[Solution], anew: Callable[[Problem], Solution]) -> Solution:
    """The best of the plans of other shapes here; planned anew where none fits, or where that may gain some percent."""
    if problem.fits_unplanned:
        return anew(problem)
    alike = [s for s in earlier if s.plan is not None and not difference(s.problem.graph, problem.graph)]
    plans: dict[Plan, str] = {s.plan: s.strategy for s in alike if s.plan is not None}
    judged = [solve(problem, GivenPlan(plan), label=label) for plan, label in plans.items()]
    fitting = [solution for solution in judged if solution.status is Status.FITS]
    if not fitting:
        return anew(problem)
    best = min(fitting, key=_extra_us)
    if not _may_gain(problem, best):
        log.info("carried over from another shape: %s", best)
        return best
    return min(best, anew(problem), key=lambda found: (found.status is not Status.FITS, _extra_us(found)))


def _may_gain(problem: Problem, found: Solution) -> bool:
    """Whether planning anew may make the step faster by so much that it is worth it."""
    enough_us = WORTH_PLANNING * problem.graph.time_us
    if _extra_us(found) <= enough_us:
        return False
    quick = solve(problem, strategies.make(QUICK_STRATEGY))
    return quick.status is Status.FITS and _extra_us(found) - _extra_us(quick) > enough_us


def _extra_us(solution: Solution) -> float:
    assert solution.timeline is not None
    return solution.timeline.extra_us


def kept(forms: Sequence[F], graph_of: Callable[[F], Graph], *, most: int | None, most_bytes: int) -> list[F]:
    """The forms that stay, the most recently used first: `most`, or as many as are within bytes, and a few anyway."""
    if most is not None:
        return list(forms[:most])
    count = taken = 0
    for form in forms:
        taken += BYTES_AN_OP * len(graph_of(form).ops)
        if count >= LEAST_FORMS and taken > most_bytes:
            break
        count += 1
    return list(forms[:count])
