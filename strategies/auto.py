"""`auto`: the cheapest plan that a few seconds can find, for whoever does not want to choose."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import ClassVar

import strategies
from planner.errors import StrategyError
from planner.ir import Graph
from planner.plan import Plan
from planner.solve import Problem, Status, solve

log = logging.getLogger("recompute_planner")

LEAST_SECONDS = 5.0
OPS_A_SECOND = 500


def few_seconds(graph: Graph) -> float:
    """Enough for a plan and its proof on a quiet machine, also for models of ten thousand ops."""
    return max(LEAST_SECONDS, len(graph.ops) / OPS_A_SECOND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """`mutwo` at once, then `ilp` until it has proven its plan, or for `seconds` if the problem allows as many.

    Without `seconds` it takes up to five, and more for a step of more than 2,500 ops.
    """

    name: ClassVar[str] = "auto"
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise StrategyError(f"seconds={self.seconds}: it needs some time")

    def plan(self, problem: Problem) -> Plan:
        seconds = self.seconds if self.seconds is not None else few_seconds(problem.graph)
        limited = problem.limited(min(seconds, problem.time_limit_s))
        log.debug("auto: ilp, with mutwo as its seed, for at most %.1f s", limited.time_limit_s)
        solution = solve(limited, strategies.make("ilp"))  # which asks `mutwo` first
        assert solution.plan is not None, "ilp always has the plans of its seeds"
        proven = solution.gap is not None and solution.status is Status.FITS
        gap = f", within {solution.gap:.2%} of the optimum" if proven else ""
        return replace(solution.plan, note=f"auto: {solution.plan.note.removeprefix('ilp: ')}{gap}")
