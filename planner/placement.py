"""Where moves to the host begin and end: boundaries for a set of storages, with the exact peak and stall they mean.

A *stage* is an op of the original order together with the reruns placed just before it, as in `planner.incremental`.
Copies out are served in the order in which storages fall idle; each is gone when it is estimated to be done, and waited
for earlier only where memory demands it. Copies back begin as early as memory allows, and where it does not allow them
all, what is wanted last comes last. Estimates decide where a boundary is put; what it then means for memory follows
from its place alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.plan import Eviction, Plan, Restore

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """One storage, in stages: copied out after `after`, away from `gone` up to `back`, wanted in `need`."""

    storage: int
    nbytes: int
    after: int
    need: int
    gone: int = 0
    back: int = 0

    @property
    def eviction(self) -> Eviction:
        return Eviction(
            storage=self.storage,
            free_after=self.after,
            restore_before=self.need,
            how=Restore.OFFLOAD,
            gone_before=self.gone,
            back_before=self.back,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The moves worth making, and what they and the recomputation beside them come to."""

    moves: tuple[Move, ...]
    stage_bytes: Bytes
    stall_us: float
    recompute_us: float
    stalls: dict[int, float]  # stage -> how long it waits

    @property
    def peak_bytes(self) -> int:
        return int(self.stage_bytes.max(initial=0))

    @property
    def peak_stage(self) -> int:
        return int(self.stage_bytes.argmax()) if len(self.stage_bytes) else 0

    @property
    def extra_us(self) -> float:
        return self.recompute_us + self.stall_us

    @property
    def storages(self) -> frozenset[int]:
        """What is really moved: not every storage asked for has anywhere to go."""
        return frozenset(move.storage for move in self.moves)

    def added_to(self, plan: Plan) -> Plan:
        """`plan`, which keeps what is moved, with the moves."""
        return replace(plan, evictions=(*plan.evictions, *(move.eviction for move in self.moves)))


def place(
    state: Incremental,
    moved: Iterable[int],
    *,
    budget_bytes: int,
    link: HostLink,
    host_budget_bytes: int | None = None,
) -> Placement:
    """Boundaries for `moved`, which `state` keeps; those that the host has no room for stay, the last ones first."""
    stage_bytes, recompute_us = state.stage_bytes(), state.recompute_us
    wanted = _wanted(state, moved, host_budget_bytes)
    if not wanted:
        return Placement(moves=(), stage_bytes=stage_bytes, stall_us=0.0, recompute_us=recompute_us, stalls={})
    starts = np.concatenate((np.zeros(1), np.cumsum(state.stage_us()))).tolist()
    out = _gone(wanted, stage_bytes - budget_bytes, starts, link)
    moves = _back(out, stage_bytes - budget_bytes)
    stalls = _stalls(moves, starts, link)
    return Placement(
        moves=tuple(sorted(moves, key=lambda move: move.storage)),
        stage_bytes=stage_bytes - _absent_bytes(moves, len(stage_bytes)),
        stall_us=sum(stalls.values()),
        recompute_us=recompute_us,
        stalls=stalls,
    )


def _wanted(state: Incremental, moved: Iterable[int], host_budget_bytes: int | None) -> list[Move]:
    """Each storage with its gap, in the order in which copies out are served."""
    moves = []
    on_host = np.zeros(len(state.graph.ops), dtype=np.int64)  # after each op, where that is bounded
    for storage in moved:
        after, need, nbytes = state.freed_after(storage), state.need(storage), state.graph.storages[storage].nbytes
        if need - after < 2:
            continue
        if host_budget_bytes is not None:
            if on_host[after:need].max() + nbytes > host_budget_bytes:
                continue
            on_host[after:need] += nbytes
        moves.append(Move(storage, nbytes, after, need))
    # Of what falls idle together, what is wanted last goes first: it is worth most.
    return sorted(moves, key=lambda move: (move.after, -move.need, move.storage))


def _gone(wanted: Sequence[Move], over: Bytes, starts: Sequence[float], link: HostLink) -> list[Move]:
    """The same moves, gone as early as can be and back when wanted; without those that would never be in time."""
    lane_us, stalls, stalled, stage = 0.0, list[int](), [0.0], 0
    gone: list[Move] = []
    for move in wanted:
        idle_us = starts[move.after + 1] + stalled[bisect_right(stalls, move.after)]
        done_us = max(lane_us, idle_us) + link.out_us(move.nbytes)
        stage = max(stage, move.after + 1)
        done = max(stage, bisect_left(starts, done_us - stalled[-1]))
        lane_us = done_us
        urgent = over[stage : min(done, move.need)] > 0
        first = int(urgent.argmax()) if len(urgent) else 0
        at = stage + first if len(urgent) and urgent[first] else done
        if at >= move.need:
            continue
        if at < done:
            stalls.append(at)
            stalled.append(done_us - starts[at])
        stage = at
        over[at : move.need] -= move.nbytes
        gone.append(Move(move.storage, move.nbytes, move.after, move.need, at, move.need))
    return gone


def _back(moves: Sequence[Move], over: Bytes) -> list[Move]:
    """The moves with the stages before which their way back begins; without those that would never be away."""
    left = over - _absent_bytes(moves, len(over))
    away = []
    for move in sorted(moves, key=lambda move: (move.need, move.storage)):
        full = (left[move.gone : move.need] > -move.nbytes)[::-1]  # the last stages first
        last = int(full.argmax())
        back = move.need - last if full[last] else move.gone
        left[back : move.need] += move.nbytes
        if back > move.gone:
            away.append(Move(move.storage, move.nbytes, move.after, move.need, move.gone, back))
    return away


def _absent_bytes(moves: Iterable[Move], stages: int) -> Bytes:
    change = np.zeros(stages + 1, dtype=np.int64)
    for move in moves:
        change[move.gone] += move.nbytes
        change[move.back] -= move.nbytes
    return np.cumsum(change[:-1])


def _stalls(moves: Sequence[Move], starts: Sequence[float], link: HostLink) -> dict[int, float]:
    """How long each stage waits, by the clocks of the simulator: of the ops, and of the two lanes."""
    out_us = in_us = stalled_us = 0.0
    done_out: dict[int, float] = {}
    done_in: dict[int, float] = {}
    stalls: dict[int, float] = {}
    for stage, _, _, kind, move in sorted(_events(moves), key=lambda event: event[:4]):
        clock_us = starts[stage] + stalled_us
        if kind == 0:
            out_us = done_out[move.storage] = max(out_us, clock_us) + link.out_us(move.nbytes)
            continue
        if kind == 2:
            in_us = done_in[move.storage] = max(in_us, clock_us) + link.in_us(move.nbytes)
            continue
        waits_us = (done_out if kind == 1 else done_in)[move.storage] - clock_us
        if waits_us > 0:
            stalls[stage] = stalls.get(stage, 0.0) + waits_us
            stalled_us += waits_us
    return stalls


def _events(moves: Sequence[Move]) -> Iterable[tuple[int, int, int, int, Move]]:
    """(stage, turn, order in the lane, kind, move): copies out begin when a stage is over, the rest before one."""
    for rank, move in enumerate(sorted(moves, key=lambda move: (move.gone, move.storage))):
        yield move.after + 1, 0, rank, 0, move
        yield move.gone, 1, rank, 1, move
    for rank, move in enumerate(sorted(moves, key=lambda move: (move.need, move.storage))):
        yield move.back, 2, rank, 2, move
        yield move.need, 3, rank, 3, move
