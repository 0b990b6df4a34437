"""Algorithm B of μ-TWO whole: at every pick the best candidate for swapping against the best for recomputation.

`s_cand` is the activation with the largest `inactive_time`, `r_cand` the one with the largest `recompute_ratio`
(Algorithms D, E and F: `strategies.mutwo.greedy`). The paper then takes the one whose estimated overhead is smaller;
its Algorithm C estimates that of a swap by walking back from the first backward use until the copy is hidden, past
other prefetches and not into the interval of the peak. Here `planner.placement` puts the boundaries of all copies anew
for each of the two, conflicts and recomputation between them included, and their exact extra time, for each byte that
they are about, decides. At the end every pick is considered once more, beside all the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.analysis import liveness, movable
from planner.incremental import Incremental
from planner.placement import Placement, place
from planner.plan import Plan
from planner.solve import Problem
from strategies.mutwo.scores import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is dropped and moved, and what it comes to."""

    state: Incremental
    moved: tuple[int, ...]
    placed: Placement

    @property
    def plan(self) -> Plan:
        return self.placed.added_to(self.state.plan())


class Swapping:
    """One run of Algorithm B. Without `dropping` it only moves, and so has what `offload_only` proposes.

    It starts from nothing, or goes on from a `state`, which it changes, and what is `moved` already.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        counted: bool = False,
        dropping: bool = True,
        deadline: float,
        state: Incremental | None = None,
        moved: Iterable[int] = (),
    ) -> None:
        assert problem.host_link is not None
        graph = problem.graph
        self.problem, self.link, self.deadline = problem, problem.host_link, deadline
        self.state = state if state is not None else Incremental(graph, in_place=problem.in_place)
        self.nbytes = [storage.nbytes for storage in graph.storages]
        self.scores = Scores(graph, counted=counted)
        self.dropping = dropping
        self.movable = np.array(movable(graph), dtype=np.int64)
        idle = [(liveness(graph)[s].idle_after or 0, liveness(graph)[s].idle_until or 0) for s in self.movable.tolist()]
        self.idle = np.array(idle, dtype=np.int64).reshape(-1, 2)
        self.inactive = np.array([liveness(graph)[s].inactive_us for s in self.movable.tolist()])
        self.place_of = {s: i for i, s in enumerate(self.movable.tolist())}
        self.moved: list[int] = []
        self.picks: list[int] = []
        self._go_on_from(moved)
        self.placed = self._place(self.moved)

    def _go_on_from(self, moved: Iterable[int]) -> None:
        """Count what is dropped and moved already among the picks."""
        for storage in self.scores.candidates:
            if self.state.is_dropped(storage):
                self._picked_to_drop(storage)
        for storage in moved:
            self._picked_to_move(storage)

    @property
    def cut_off(self) -> bool:
        return time.perf_counter() >= self.deadline

    def run(self) -> Choice:
        """Picks until it fits, or until there is nothing left to pick."""
        while not self._fits(self.placed) and not self.cut_off:
            if not self._pick():
                break
        if self._fits(self.placed):
            self._reconsider()
        return Choice(state=self.state, moved=tuple(self.moved), placed=self.placed)

    def _fits(self, placed: Placement) -> bool:
        return placed.peak_bytes <= self.problem.budget_bytes

    def _place(self, moved: list[int]) -> Placement:
        return place(
            self.state,
            moved,
            budget_bytes=self.problem.budget_bytes,
            link=self.link,
            host_budget_bytes=self.problem.host_budget_bytes,
        )

    # -- Algorithm B ------------------------------------------------------------------------------------------------

    def _pick(self) -> bool:
        """Take the cheaper of the two candidates for each of its bytes; False without any."""
        peak = self.placed.peak_stage
        s_cand, r_cand = self._s_cand(peak), self._r_cand(peak)
        swapped = None if s_cand is None else self._place([*self.moved, s_cand])
        dropped = None if r_cand is None else self._dropped(r_cand)
        if swapped is not None and s_cand is not None:
            cost = self._cost(swapped, s_cand)
            if dropped is None or r_cand is None or cost <= self._cost(dropped, r_cand):
                self._swap(s_cand, swapped)
                return True
        if r_cand is None or dropped is None:
            return False
        self._drop(r_cand, dropped)
        return True

    def _cost(self, placed: Placement, storage: int) -> float:
        return (placed.extra_us - self.placed.extra_us) / self.nbytes[storage]

    def _s_cand(self, peak: int) -> int | None:
        idle = np.where((self.idle[:, 0] < peak) & (peak < self.idle[:, 1]), self.inactive, -1.0)
        while idle.size and idle[best := int(idle.argmax())] >= 0:
            storage = int(self.movable[best])
            if self.state.need(storage) > peak:
                return storage
            idle[best] = -1.0
        return None

    def _r_cand(self, peak: int) -> int | None:
        return self.scores.best_at(peak, self.state) if self.dropping else None

    def _dropped(self, storage: int) -> Placement:
        self.state.drop(storage)
        placed = self._place(self.moved)
        self.state.keep(storage)
        return placed

    def _swap(self, storage: int, placed: Placement) -> None:
        self.placed = placed
        self._picked_to_move(storage)

    def _drop(self, storage: int, placed: Placement) -> None:
        self.state.drop(storage)
        self.placed = placed
        self._picked_to_drop(storage)

    def _picked_to_move(self, storage: int) -> None:
        self.moved.append(storage)
        self.picks.append(storage)
        self.scores.leave_out(storage)
        self.inactive[self.place_of[storage]] = -1.0

    def _picked_to_drop(self, storage: int) -> None:
        self.picks.append(storage)
        self.scores.pick(storage)
        if storage in self.place_of:
            self.inactive[self.place_of[storage]] = -1.0

    # -- afterwards -------------------------------------------------------------------------------------------------

    def _reconsider(self) -> None:
        """Every pick once more, the first ones last: keep it again, or do the other thing, where that takes less time.

        Later picks may have made an earlier one needless, or filled the lane that it was meant for.
        """
        for storage in reversed(self.picks):
            if self.cut_off:
                return
            if storage in self.moved:
                self._keep_or_drop(storage)
            else:
                self._keep_or_move(storage)

    def _keep_or_drop(self, storage: int) -> None:
        rest = [s for s in self.moved if s != storage]
        if self._improved(rest, self._place(rest)) or not self.dropping or storage not in self.scores.place:
            return
        self.state.drop(storage)
        if not self._improved(rest, self._place(rest)):
            self.state.keep(storage)

    def _keep_or_move(self, storage: int) -> None:
        self.state.keep(storage)
        if self._improved(self.moved, self._place(self.moved)):
            return
        moved = [*self.moved, storage]
        if storage not in self.place_of or not self._improved(moved, self._place(moved)):
            self.state.drop(storage)

    def _improved(self, moved: list[int], placed: Placement) -> bool:
        """Take it if it fits and takes no more time."""
        better = self._fits(placed) and placed.extra_us < self.placed.extra_us + 1e-9
        if better:
            self.moved, self.placed = moved, placed
        return better
