"""The recomputation state of every candidate: μ-TWO's Algorithms D, E and F."""

from __future__ import annotations

import math

import numpy as np

from planner.analysis import candidates, liveness
from planner.incremental import Incremental
from planner.ir import Graph
from planner.plan import recomputation


class Scores:
    """What is left to pick, and how much each would give for its time."""

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
        self.taken: set[int] = set()  # by somebody else: moved to the host
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

    def leave_out(self, storage: int) -> None:
        """It is moved to the host instead: no candidate any more, and still there to start from."""
        if storage in self.place:
            self.taken.add(storage)
            self.ratios[self.place[storage]] = -1.0

    def best_at(self, peak: int, state: Incremental) -> int | None:
        """`r_cand` of Algorithm B among what is live at the peak and would not be wanted back by then."""
        ratios = np.where((self.idle_after < peak) & (peak < self.idle_until), self.ratios, -1.0)
        while ratios.size and ratios[best := int(ratios.argmax())] >= 0:
            if state.need(self.candidates[best]) > peak:
                return self.candidates[best]
            ratios[best] = -1.0
        return None

    def _walk_back(self, storage: int) -> None:
        """Set `recomp_srcs` and `recomp_time` of a storage from what is resident now."""
        recomp_graph = recomputation(self.graph, storage, self.remaining.__contains__)
        for source in recomp_graph.sources:
            self.users[source].add(storage)
        self.recomp_srcs[storage] = recomp_graph.sources
        self.recomp_time[storage] = recomp_graph.time_us(self.graph)

    def _score(self, storage: int) -> None:
        if storage in self.taken:
            return
        total = self.recomp_time[storage] * (self.recomp_cnt[storage] if self.counted else 1)
        nbytes = self.graph.storages[storage].nbytes
        self.ratios[self.place[storage]] = nbytes / total if total > 0 else math.inf


def _idle(graph: Graph, storage: int) -> tuple[int, int]:
    live = liveness(graph)[storage]
    assert live.idle_after is not None
    assert live.idle_until is not None
    return live.idle_after, live.idle_until
