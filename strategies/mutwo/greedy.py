"""`mutwo`: the greedy recompute-ratio policy of μ-TWO, made exact by the shared simulator.

Purandare, Wasay, Jain, Idreos: "μ-TWO: 3x Faster Multi-Model Training with Orchestration and Memory
Optimization", MLSys 2023, section 4 and appendix A. Swapping is off, so Algorithm B always takes `r_cand`.
The names `recomp_srcs`, `recomp_graph`, `recomp_time`, `recomp_cnt` and `recompute_ratio` are the paper's.

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
it shows in a table what the exact simulator says of it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from planner.analysis import candidates, liveness
from planner.incremental import Incremental
from planner.ir import Graph
from planner.plan import Plan, recomputation, recompute_each_time, recompute_once
from planner.solve import Problem
from strategies.mutwo.paper import paper_picks


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
            return recompute_each_time(problem.graph, paper_picks(problem.graph, problem.budget_bytes))
        deadline = time.perf_counter() + problem.time_limit_s
        prefixes = curve(problem.graph, in_place=problem.in_place, deadline=deadline)
        fitting = [p for p in prefixes if p.peak_bytes <= problem.budget_bytes]
        best = fitting[0] if fitting else prefixes[-1]
        plan = recompute_once(problem.graph, best.dropped) if best.dropped else Plan()
        return replace(plan, cut_off=time.perf_counter() > deadline)


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
    state, scores = Incremental(graph, in_place=in_place), _Scores(graph, counted=counted)
    picks: list[int] = []
    points = [(state.peak()[0], 0.0)]
    while time.perf_counter() < deadline and (storage := _next_pick(state, scores)) is not None:
        state.drop(storage)
        scores.pick(storage)
        picks.append(storage)
        points.append((state.peak()[0], state.recompute_us))
    return picks, points


def _next_pick(state: Incremental, scores: _Scores) -> int | None:
    """`r_cand` of Algorithm B among what is live at the peak and would not be wanted back by then."""
    _, peak = state.peak()
    ratios = np.where((scores.idle_after < peak) & (peak < scores.idle_until), scores.ratios, -1.0)
    while ratios.size and ratios[best := int(ratios.argmax())] >= 0:
        if state.need(scores.candidates[best]) > peak:
            return scores.candidates[best]
        ratios[best] = -1.0
    return None


class _Scores:
    """The recomputation state of every candidate (Algorithms D, E, F)."""

    def __init__(self, graph: Graph, *, counted: bool) -> None:
        self.graph = graph
        self.counted = counted
        self.candidates = candidates(graph)
        self.remaining = dict.fromkeys(self.candidates)
        idle = np.array([_idle(graph, s) for s in self.candidates], dtype=np.int64).reshape(-1, 2)
        self.idle_after, self.idle_until = idle[:, 0], idle[:, 1]
        self.recomp_srcs: dict[int, frozenset[int]] = {}
        self.recomp_time: dict[int, float] = {}
        self.recomp_cnt = dict.fromkeys(self.remaining, 1)
        self.users: dict[int, set[int]] = {s: set() for s in self.remaining}  # source -> who starts from it
        self.place = {s: i for i, s in enumerate(self.candidates)}
        self.ratios = np.full(len(self.candidates), -1.0)  # `recompute_ratio`; -1 of what was picked
        for storage in self.remaining:
            self._walk_back(storage)
            self._score(storage)

    def pick(self, storage: int) -> None:
        """Make `storage` a pick: it is a source no longer (E for earlier picks, F(a) for candidates)."""
        del self.remaining[storage]
        self.ratios[self.place[storage]] = -1.0
        for source in self.recomp_srcs[storage]:
            self.recomp_cnt[source] += 1  # F(b): one more pick is recomputed from it
        for user in sorted(self.users.pop(storage)):
            before = self.recomp_srcs[user]
            self._walk_back(user)
            if user not in self.remaining:
                for source in self.recomp_srcs[user] - before:
                    self.recomp_cnt[source] += 1
            else:
                self._score(user)
        for source in self.recomp_srcs[storage]:
            self._score(source)

    def _walk_back(self, storage: int) -> None:
        """Set `recomp_srcs` and `recomp_time` of a storage from what is resident now."""
        recomp_graph = recomputation(self.graph, storage, self.remaining.__contains__)
        for source in recomp_graph.sources:
            self.users[source].add(storage)
        self.recomp_srcs[storage] = recomp_graph.sources
        self.recomp_time[storage] = recomp_graph.time_us(self.graph)

    def _score(self, storage: int) -> None:
        total = self.recomp_time[storage] * (self.recomp_cnt[storage] if self.counted else 1)
        nbytes = self.graph.storages[storage].nbytes
        self.ratios[self.place[storage]] = nbytes / total if total > 0 else math.inf


def _idle(graph: Graph, storage: int) -> tuple[int, int]:
    live = liveness(graph)[storage]
    assert live.idle_after is not None
    assert live.idle_until is not None
    return live.idle_after, live.idle_until
