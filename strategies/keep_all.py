"""`keep_all`: recompute nothing. The control row of every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner.plan import Plan
from planner.solve import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll:
    """Keeps every activation, as plain training does."""

    name: ClassVar[str] = "keep_all"

    def plan(self, problem: Problem) -> Plan:
        return Plan()
