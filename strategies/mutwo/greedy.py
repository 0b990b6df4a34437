"""`mutwo`: the greedy recompute-ratio policy of μ-TWO, made exact by the shared simulator.

Purandare, Wasay, Jain, Idreos: "μ-TWO: 3x Faster Multi-Model Training with Orchestration and Memory
Optimization", MLSys 2023, section 4 and appendix A. Without a host link swapping is off, and Algorithm B always takes
`r_cand`; with one, `strategies.mutwo.swapping` weighs both. The names
`recomp_srcs`, `recomp_graph`, `recomp_time`, `recomp_cnt` and `recompute_ratio` are the paper's.

Where the paper is silent or wrong, this is what happens here:

1. Initial `recomp_srcs`: walking back from the candidate to graph inputs and to other candidates.
2. `recomp_time` includes the producing op.
3. Totals are derived from the current picks whenever a source changes hands; none is stored stale (E).
4. `recomp_time` is the run time of a *set* of ops, so shared ancestors count once, and counts accumulate (F).
   Since clones are shared (9), a count above one stands for a clone held longer rather than made again: the
   order that honours the paper's counts is often better at small budgets and dearer at large ones. Both
   orders are computed, with counts and with every count at one.
5. "Resident anyway" holds by construction: the lowering shares a clone from its first need to its last use.
6. The peak is the shared simulator's: with recomputation temporaries, aliasing, workspaces, in-place forms.
7. Only what is live at the current peak, and would be gone from it, is picked.
8. Candidates are storages: a view costs nothing and frees nothing, so it is never one.
9. Clones are shared while resident: every op is rerun at most once.
10. Greedy is not monotone: the cheapest prefix of either order that fits is returned, not the last one.
11. The simulation is incremental.

The orders do not depend on the budget, so one run gives the whole curve (`curve`).
`mutwo:faithful=true` follows the paper to the letter instead, Algorithm G's own estimate of the peak included;
it shows in a table what the exact simulator says of it. With a link it swaps by Algorithm C's estimates, too.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from planner.incremental import Incremental
from planner.ir import Graph
from planner.plan import Plan, recompute_once
from planner.solve import Problem, cheapest
from strategies.mutwo.paper import paper_plan
from strategies.mutwo.scores import Scores
from strategies.mutwo.swapping import Swapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The first picks of a greedy order, and what they come to."""

    dropped: tuple[int, ...]
    peak_bytes: int
    recompute_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MuTwo:
    """The paper's reference policy. `faithful` switches the closed holes off, for comparison."""

    name: ClassVar[str] = "mutwo"
    faithful: bool = False

    def plan(self, problem: Problem) -> Plan:
        if self.faithful:
            host_bytes = problem.host_budget_bytes
            return paper_plan(problem.graph, problem.budget_bytes, problem.host_link, host_bytes=host_bytes)
        if problem.host_link is not None:
            return self._with_moves(problem)
        deadline = time.perf_counter() + problem.time_limit_s
        prefixes = curve(problem.graph, in_place=problem.in_place, deadline=deadline)
        fitting = [p for p in prefixes if p.peak_bytes <= problem.budget_bytes]
        best = fitting[0] if fitting else prefixes[-1]
        plan = recompute_once(problem.graph, best.dropped) if best.dropped else Plan()
        return replace(plan, cut_off=time.perf_counter() > deadline)

    def _with_moves(self, problem: Problem) -> Plan:
        """The cheapest of what recomputation does alone and of both together, by either order.

        Where none of them fits, all that helps is moved first, since what is dropped needs room to be computed again.
        """
        deadline = time.perf_counter() + problem.time_limit_s
        plans = [self.plan(problem.without_link())]
        for counted in (False, True):
            if time.perf_counter() < deadline:
                plans.append(Swapping(problem, counted=counted, deadline=deadline).run().plan)
        best = cheapest(problem, plans)
        if time.perf_counter() < deadline and not problem.fits(problem.timeline(best)):
            moved = Swapping(problem, dropping=False, deadline=deadline).run().moved
            best = cheapest(problem, [best, Swapping(problem, moved=moved, deadline=deadline).run().plan])
        return replace(best, cut_off=time.perf_counter() > deadline)


def curve(graph: Graph, *, in_place: bool = True, deadline: float = math.inf) -> list[Prefix]:
    """The prefixes worth having, from the cheapest to the one with the smallest peak: each lowers the peak.

    No storage is picked after `deadline`, a time of `time.perf_counter`.
    """
    orders = [_order(graph, in_place=in_place, counted=counted, deadline=deadline) for counted in (False, True)]
    prefixes = sorted(
        (
            (us, peak, which, length)
            for which, (_, points) in enumerate(orders)
            for length, (peak, us) in enumerate(points)
        )
    )
    worth: list[Prefix] = []
    for us, peak, which, length in prefixes:
        if not worth or peak < worth[-1].peak_bytes:
            dropped = tuple(orders[which][0][:length])
            worth.append(Prefix(dropped=dropped, peak_bytes=peak, recompute_us=us))
    return worth


def _order(
    graph: Graph, *, in_place: bool, counted: bool, deadline: float = math.inf
) -> tuple[list[int], list[tuple[int, float]]]:
    """The picks in order, and the exact (peak, recompute time) of every prefix, the empty one first."""
    state, scores = Incremental(graph, in_place=in_place), Scores(graph, counted=counted)
    picks: list[int] = []
    points = [(state.peak()[0], 0.0)]
    while time.perf_counter() < deadline and (storage := scores.best_at(state.peak()[1], state)) is not None:
        state.drop(storage)
        scores.pick(storage)
        picks.append(storage)
        points.append((state.peak()[0], state.recompute_us))
    return picks, points
