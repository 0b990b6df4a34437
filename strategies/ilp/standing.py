"""What a search has found and proven so far, and the plan that it ends with."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from planner.analysis import floor
from planner.errors import NoPlan
from planner.incremental import Incremental
from planner.plan import BoundClass, Plan, with_bound
from planner.solve import Problem
from planner.units import human_bytes
from strategies.ilp.shared_work import tell_tried
from strategies.ilp.solvers import TOLERANCE

SEEDS = ("mutwo", "sqrtn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, what it comes to, and who found it."""

    plan: Plan
    peak_bytes: int
    recompute_us: float
    who: str


class Standing:
    """The best plans so far and the bound below them; `gap` is what counts as proven."""

    def __init__(self, problem: Problem, *, gap: float, bound_us: float) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.gap = gap
        self.started = time.perf_counter()
        self.best: Found | None = None  # the cheapest that fits
        self.alone: Found | None = None  # the same without seeds
        self.smallest: Found | None = None  # the one with the smallest peak
        self.bound_us = bound_us
        self.impossible = False  # proven for every plan that recomputes once
        self.hopeless = False  # proven for any schedule
        self.floor_bytes = 0  # the smallest peak not proven out of reach of such plans
        self.cut_off = False
        self.failure = ""

    def _offer(self, found: Found) -> None:
        peak_bytes, extra_us = found.peak_bytes, found.recompute_us
        tell_tried(self.problem, found.who, started=self.started, peak_bytes=peak_bytes, extra_us=extra_us)
        if self.smallest is None or found.peak_bytes < self.smallest.peak_bytes:
            self.smallest = found
        if found.peak_bytes > self.problem.budget_bytes:
            return
        if self.best is None or found.recompute_us < self.best.recompute_us - 1e-9:
            self.best = found
        if not found.who.endswith(SEEDS) and (self.alone is None or found.recompute_us < self.alone.recompute_us):
            self.alone = found

    def _offer_state(self, state: Incremental, who: str) -> None:
        self._offer(Found(plan=state.plan(), peak_bytes=state.peak()[0], recompute_us=state.recompute_us, who=who))

    def _proven(self) -> bool:
        """Whether the best plan is within the gap asked for."""
        if self.best is None:
            return self.impossible
        gap_us = (self.gap + 2 * TOLERANCE) * self.best.recompute_us
        return self.best.recompute_us - self.bound_us <= gap_us + 1e-9

    def _optimal(self) -> bool:
        """Whether nothing that recomputes once can be any better."""
        if self.best is None:
            return False
        return self.best.recompute_us - self.bound_us <= 2e-6 * max(1.0, self.best.recompute_us)

    # -- the answer -------------------------------------------------------------------------------------------

    def _answer(self) -> Plan:
        found = self.best if self.best is not None else self.smallest
        if found is None:
            limit = f"ilp: no plan within {self.problem.time_limit_s:.1f} s; {self._floor()}: raise the time limit"
            raise NoPlan(self.failure or limit)
        plan = replace(found.plan, cut_off=self.cut_off, found_by=found.who, note=self._note(found))
        if self.best is None:
            return plan  # a bound on the time of plans that fit says nothing of one that does not
        bound_us = max(0.0, min(self.bound_us, found.recompute_us))
        return with_bound(plan, lower_bound_us=bound_us, bound_class=BoundClass.RECOMPUTE_ONCE)

    def _note(self, found: Found) -> str:
        """Who won, what the program reached without seeds, and what is proven."""
        if self.failure:
            return f"ilp: only its seeds, {found.who} won; {self.failure}"
        words = [f"ilp: {found.who} won"]
        if self.best is None:
            words.append(self._floor())
        elif self.alone is None:
            words.append("the program alone found nothing that fits")
        elif self.best.recompute_us < self.alone.recompute_us - 1e-9:
            words.append(f"the program alone reached {self.alone.recompute_us / self.graph.time_us:.2%}")
        if self.cut_off:
            words.append("cut off by the time limit")
        return "; ".join(words)

    def _floor(self) -> str:
        least = floor(self.graph, in_place=self.problem.in_place).nbytes
        higher = self.floor_bytes and self.floor_bytes >= least  # a search that was cut off may have proven less
        once = f", none that recomputes once in less than {human_bytes(self.floor_bytes)}" if higher else ""
        proof = "proven: nothing that recomputes once fits; " if self.impossible else ""
        proof = "proven: nothing fits, however often it recomputes; " if self.hopeless else proof
        return f"{proof}no schedule at all runs in less than {human_bytes(least)}{once}"
