"""Exact local search among keeping, recomputing and moving: the last word of `strategies.ilp.joint`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import Enum
from random import Random

from planner.analysis import candidates, movable
from planner.placement import place
from planner.solve import Problem
from strategies.mutwo.swapping import Choice

WORTH_US = 1e-6
EXCHANGES = 400


class _Fate(Enum):
    """What becomes of a storage while it idles."""

    KEPT = "kept"
    MOVED = "moved"
    DROPPED = "dropped"


class JointPolish:
    """Exact local search: another fate for one storage, or two that exchange theirs; so many are evaluated."""

    def __init__(self, problem: Problem, choice: Choice, *, evaluations: int, deadline: float) -> None:
        assert problem.host_link is not None
        self.problem, self.link, self.deadline = problem, problem.host_link, deadline
        self.evaluations = evaluations
        self.state, self.placed = choice.state, choice.placed
        self.moved = dict.fromkeys(choice.moved)
        graph = problem.graph
        self.droppable, self.movable = set(candidates(graph)), set(movable(graph))
        sizes = graph.storages
        self.storages = sorted(self.droppable | self.movable, key=lambda s: (-sizes[s].nbytes, s))
        self.cut_off = False

    def run(self) -> Choice:
        while self._improve_singles() or self._improve_pairs():
            pass
        return Choice(state=self.state, moved=tuple(self.moved), placed=self.placed)

    def _spent(self) -> bool:
        self.cut_off = time.perf_counter() >= self.deadline
        return self.cut_off or self.evaluations <= 0

    def _fate(self, storage: int) -> _Fate:
        if self.state.is_dropped(storage):
            return _Fate.DROPPED
        return _Fate.MOVED if storage in self.moved else _Fate.KEPT

    def _may(self, storage: int, fate: _Fate) -> bool:
        return fate is _Fate.KEPT or storage in (self.movable if fate is _Fate.MOVED else self.droppable)

    def _set(self, storage: int, fate: _Fate) -> None:
        if self.state.is_dropped(storage) and fate is not _Fate.DROPPED:
            self.state.keep(storage)
        if fate is _Fate.DROPPED and not self.state.is_dropped(storage):
            self.state.drop(storage)
        self.moved.pop(storage, None)
        if fate is _Fate.MOVED:
            self.moved[storage] = None

    def _try(self, fates: dict[int, _Fate]) -> bool:
        """Take these fates if that fits and takes less time."""
        self.evaluations -= 1
        before = {s: self._fate(s) for s in fates}
        order = tuple(self.moved)
        for storage, fate in fates.items():
            self._set(storage, fate)
        placed = place(
            self.state,
            self.moved,
            budget_bytes=self.problem.budget_bytes,
            link=self.link,
            host_budget_bytes=self.problem.host_budget_bytes,
        )
        if placed.peak_bytes <= self.problem.budget_bytes and placed.extra_us < self.placed.extra_us - WORTH_US:
            self.placed = placed
            return True
        for storage, fate in before.items():
            self._set(storage, fate)
        self.moved = dict.fromkeys(order)
        return False

    def _improve_singles(self) -> bool:
        improved = False
        for storage in self.storages:
            for fate in _Fate:
                if fate is self._fate(storage) or not self._may(storage, fate):
                    continue
                if self._spent():
                    return False
                improved |= self._try({storage: fate})
        return improved

    def _improve_pairs(self) -> bool:
        improved = False
        for a, b in self._pairs():
            if self._spent():
                return False
            improved |= self._try({a: self._fate(b), b: self._fate(a)})
        return improved

    def _pairs(self) -> Iterator[tuple[int, int]]:
        """Some pairs of unlike fate, the same ones for the same storages."""
        random = Random(len(self.storages))
        for _ in range(EXCHANGES if len(self.storages) > 1 else 0):
            a, b = random.sample(self.storages, 2)
            if self._fate(a) is not self._fate(b) and self._may(a, self._fate(b)) and self._may(b, self._fate(a)):
                yield a, b
