"""Local search on the exact incremental simulator: make a set of dropped storages fit, then make it cheaper."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from planner.incremental import Incremental

# An improvement must be worth more than the noise of adding floats in another order.
WORTH_US = 1e-6
FEW_CANDIDATES = 16  # that a repair tries first, of what lies where it is over the budget


class Polish:
    """Flips single storages and pairs; every step is judged exactly.

    `evaluations` bounds the work, so that the result does not depend on the clock unless `deadline` cuts it off.
    """

    def __init__(
        self, state: Incremental, movable: Sequence[int], budget_bytes: int, *, evaluations: int, deadline: float
    ) -> None:
        self.state = state
        self.movable = movable
        self.budget_bytes = budget_bytes
        self.evaluations = evaluations
        self.deadline = deadline
        self.cut_off = False

    def fits(self) -> bool:
        return self.state.peak()[0] <= self.budget_bytes

    def run(self) -> bool:
        """Repair, then improve; True if the result fits."""
        if not self.repair():
            return False
        while self._keep_more() or self._swap():
            pass
        return True

    def repair(self) -> bool:
        """Flip what takes most bytes off the overflow for its time, until nothing is over the budget."""
        while not self.fits():
            best = self._best_repair()
            if best is None:
                return False
            self._flip(best)
        return True

    # -- moves ------------------------------------------------------------------------------------------------

    def _flip(self, storage: int) -> None:
        if self.state.is_dropped(storage):
            self.state.keep(storage)
        else:
            self.state.drop(storage)

    def _spent(self) -> bool:
        self.evaluations -= 1
        if time.perf_counter() > self.deadline:
            self.cut_off = True
        return self.evaluations < 0 or self.cut_off

    def _overflow(self) -> int:
        return int(np.maximum(self.state.stage_bytes() - self.budget_bytes, 0).sum())

    def _best_repair(self) -> int | None:
        """The best of a few that lie at the worst place, or of all where none of them helps."""
        best = self._best_flip(self._likely())
        return best if best is not None else self._best_flip(self.movable)

    def _likely(self) -> list[int]:
        """What idles where most is too much: the most bytes for the time of its maker first."""
        state, graph = self.state, self.state.graph
        stage = int(state.stage_bytes().argmax())
        idle = [s for s in self.movable if not state.is_dropped(s) and state.freed_after(s) < stage < state.need(s)]

        def time_a_byte(storage: int) -> tuple[float, int]:
            maker = graph.maker[storage]
            time_us = graph.ops[maker].time_us if maker is not None else 0.0
            return time_us / max(1, graph.storages[storage].nbytes), storage

        return sorted(idle, key=time_a_byte)[:FEW_CANDIDATES]

    def _best_flip(self, storages: Iterable[int]) -> int | None:
        """The cheapest flip after which all fits, or else the one that saves most bytes for its time."""
        before, before_us = self._overflow(), self.state.recompute_us
        best: tuple[tuple[bool, float], int] | None = None
        for storage in storages:
            if self._spent():
                break
            self._flip(storage)
            left, cost = self._overflow(), self.state.recompute_us - before_us
            self._flip(storage)
            if left >= before:
                continue
            score = (True, -cost) if left == 0 else (False, (before - left) / max(cost, WORTH_US))
            if best is None or score > best[0]:
                best = (score, storage)
        return best[1] if best is not None else None

    def _keep_more(self) -> bool:
        """Keep again what fits; True if anything was gained."""
        gained = False
        us = self.state.recompute_us
        for storage in self.movable:
            if not self.state.is_dropped(storage):
                continue
            if self._spent():
                return gained
            self.state.keep(storage)
            now = self.state.recompute_us
            if now < us - WORTH_US and self.fits():
                us, gained = now, True
            else:
                self.state.drop(storage)
        return gained

    def _swap(self) -> bool:
        """Keep one storage at the price of dropping another; True if anything was gained."""
        prices = self._prices()
        us = self.state.recompute_us
        for wanted, gain in self._gains():
            self.state.keep(wanted)
            for price, given in prices:
                if price >= gain or self._spent():
                    break
                if given == wanted or self.state.is_dropped(given):
                    continue
                self.state.drop(given)
                if self.fits() and self.state.recompute_us < us - WORTH_US:
                    return True
                self.state.keep(given)
            self.state.drop(wanted)
            if self.evaluations < 0 or self.cut_off:
                return False
        return False

    def _prices(self) -> list[tuple[float, int]]:
        """What dropping each kept storage alone would cost, cheapest first."""
        us, prices = self.state.recompute_us, []
        for storage in self.movable:
            if self.state.is_dropped(storage):
                continue
            if self._spent():
                break
            self.state.drop(storage)
            prices.append((self.state.recompute_us - us, storage))
            self.state.keep(storage)
        return sorted(prices)

    def _gains(self) -> list[tuple[int, float]]:
        """What keeping each dropped storage alone would save, most first."""
        us, gains = self.state.recompute_us, []
        for storage in self.movable:
            if not self.state.is_dropped(storage):
                continue
            if self._spent():
                break
            self.state.keep(storage)
            gains.append((storage, us - self.state.recompute_us))
            self.state.drop(storage)
        return sorted((g for g in gains if g[1] > WORTH_US), key=lambda g: (-g[1], g[0]))


def shed_free(state: Incremental, storages: Iterable[int], budget_bytes: int) -> None:
    """Drop what comes back with a rerun that happens anyway, while the state is over the budget."""
    us = state.recompute_us
    for storage in storages:
        if state.is_dropped(storage):
            continue
        peak = state.peak()[0]
        if peak <= budget_bytes:
            return
        state.drop(storage)
        if state.recompute_us > us or state.peak()[0] > peak:
            state.keep(storage)


def enumerate_all(state: Incremental, free: Sequence[int], budget_bytes: int) -> frozenset[int] | None:
    """The dropped set with the least recompute time that fits, of all sets of `free`; None if none fits."""
    best: tuple[float, frozenset[int]] | None = None
    for number in range(1, 2 ** len(free) + 1):
        us = state.recompute_us
        if state.peak()[0] <= budget_bytes and (best is None or us < best[0] - WORTH_US):
            best = us, frozenset(state.dropped)
        turn = (number & -number).bit_length() - 1  # Gray code: each set differs from the last in one storage
        if turn < len(free):
            storage = free[turn]
            (state.keep if state.is_dropped(storage) else state.drop)(storage)
    return None if best is None else best[1]
