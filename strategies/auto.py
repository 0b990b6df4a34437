"""`auto`: the cheapest plan that a few seconds can find, for whoever does not want to choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import strategies
from planner.plan import Plan
from planner.solve import Problem, Status, solve


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """`mutwo` at once, then `ilp` until it has proven its plan, or for `seconds` if the problem allows as many."""

    name: ClassVar[str] = "auto"
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds}: it needs some time")

    def plan(self, problem: Problem) -> Plan:
        limited = replace(problem, time_limit_s=min(self.seconds, problem.time_limit_s))
        solution = solve(limited, strategies.make("ilp"))  # which asks `mutwo` first
        assert solution.plan is not None, "ilp always has the plans of its seeds"
        proven = solution.gap is not None and solution.status is Status.FITS
        gap = f", within {solution.gap:.2%} of the optimum" if proven else ""
        return replace(solution.plan, note=f"auto: {solution.plan.note.removeprefix('ilp: ')}{gap}")
