"""A plan that was made before, offered as if it were thought of now."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from planner.plan import Plan
from planner.solve import Problem


class GivenPlan:
    """The strategy that proposes one plan."""

    name: ClassVar[str] = "plan file"

    def __init__(self, plan: Plan, *, bound_holds: bool = False) -> None:
        # A bound is proven for the times of one graph, and times are measured anew in every run, unless they are kept.
        self._plan = plan if bound_holds else replace(plan, lower_bound_us=None, bound_class=None)

    @property
    def keeps_all(self) -> bool:
        return not self._plan.evictions

    def plan(self, problem: Problem) -> Plan:
        return self._plan
