"""`offload_only`: move to the host, recompute nothing. The control row of every table with a host link."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from planner.plan import Plan
from planner.solve import Problem
from strategies.mutwo.swapping import Swapping


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOnly:
    """Moves what idles longest, one activation after the other, until it fits; without a host link it moves nothing."""

    name: ClassVar[str] = "offload_only"

    def plan(self, problem: Problem) -> Plan:
        if problem.host_link is None:
            return Plan(note="offload_only: there is no host link to move anything over")
        deadline = time.perf_counter() + problem.time_limit_s
        choice = Swapping(problem, dropping=False, deadline=deadline).run()
        evictions = tuple(move.eviction for move in choice.placed.moves)
        return replace(Plan(evictions=evictions), cut_off=time.perf_counter() > deadline)
