"""μ-TWO's Algorithms B to G to the letter, for `mutwo:faithful=true`. See `strategies.mutwo.greedy`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.analysis import candidates, liveness, movable, rerun_reads
from planner.host_link import HostLink
from planner.ir import Graph
from planner.plan import Eviction, Plan, Restore, recomputation, recompute_each_time
from planner.schedule import RunKind, lower


@dataclass(slots=True)
class _Candidate:
    """The paper's recomputation state of one intermediate."""

    storage: int
    memory_size: int
    first_bw_access: int
    last_bw_access: int
    recomp_srcs: set[int]
    recomp_time: float
    total_recomp_time: float
    inactive_time: float = 0.0

    @property
    def recompute_ratio(self) -> float:
        return self.memory_size / self.total_recomp_time if self.total_recomp_time > 0 else float("inf")


def paper_plan(graph: Graph, limit_bytes: int, link: HostLink | None, *, host_bytes: int | None = None) -> Plan:
    """What the paper's estimates lead to; it is carried out as well as it can be, for the judge to say what it is."""
    picks = paper_picks(graph, limit_bytes, link, host_bytes=host_bytes)
    plan = recompute_each_time(graph, picks.dropped)
    if link is None or not picks.prompts:
        return plan
    wanted = _first_wanted(graph, plan)
    return Plan(evictions=(*plan.evictions, *_moves(graph, picks.prompts, wanted, link)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """What is dropped, in order, and per swapped storage its prefetch prompt: the op before which it comes back."""

    dropped: tuple[int, ...]
    prompts: dict[int, int]


def paper_picks(
    graph: Graph, limit_bytes: int, link: HostLink | None = None, *, host_bytes: int | None = None
) -> Picks:
    """Algorithm B: the picks until Algorithm G's estimate is under the limit; without a link none is swapped."""
    remaining = {s: _candidate(graph, s) for s in candidates(graph)}
    picks: dict[int, _Candidate] = {}
    resident = _resident_bytes(graph)
    swaps = _Swaps(graph, link, limit_bytes, host_bytes) if link is not None else None
    while remaining and resident.max(initial=0) > limit_bytes:
        r_cand = max(remaining.values(), key=lambda c: (c.recompute_ratio, -c.storage))
        s_cand = swaps.cheaper_than(r_cand, remaining, picks, resident) if swaps is not None else None
        chosen = r_cand if s_cand is None else s_cand
        del remaining[chosen.storage]
        if swaps is not None and s_cand is not None:
            swaps.take(s_cand, picks, resident)
        else:
            recomp_cnt = _update_picks(picks, chosen)
            picks[chosen.storage] = chosen
            _update_candidates(remaining, picks, chosen, recomp_cnt)
        _forget_while_idle(graph, resident, chosen.storage)
        if swaps is not None:
            swaps.refresh(picks, resident)
    return Picks(dropped=tuple(picks), prompts=swaps.prompts if swaps is not None else {})


class _Swaps:
    """Algorithm C: what swaps cost after overlap, and the prompts at which they are fetched again."""

    def __init__(self, graph: Graph, link: HostLink, limit_bytes: int, host_bytes: int | None) -> None:
        self.graph, self.link, self.limit_bytes = graph, link, limit_bytes
        self.host_bytes = math.inf if host_bytes is None else host_bytes  # the paper knows no limit
        self.movable = frozenset(movable(graph))
        self.swapped: dict[int, _Candidate] = {}
        self.prompts: dict[int, int] = {}
        self.stalls: dict[int, float] = {}

    def cheaper_than(
        self,
        r_cand: _Candidate,
        remaining: dict[int, _Candidate],
        picks: dict[int, _Candidate],
        resident: npt.NDArray[np.int64],
    ) -> _Candidate | None:
        """`s_cand`, if its overhead is below that of `r_cand`."""
        room = self.host_bytes - sum(c.memory_size for c in self.swapped.values())
        offered = [c for c in remaining.values() if c.storage in self.movable and c.memory_size <= room]
        if not offered:
            return None
        s_cand = max(offered, key=lambda c: (c.inactive_time, -c.storage))
        overhead, _ = self._overhead(s_cand, picks, resident)
        return s_cand if overhead < r_cand.total_recomp_time else None

    def take(self, chosen: _Candidate, picks: dict[int, _Candidate], resident: npt.NDArray[np.int64]) -> None:
        stall, prompt = self._overhead(chosen, picks, resident)
        self.swapped[chosen.storage] = chosen
        self.prompts[chosen.storage], self.stalls[chosen.storage] = prompt, stall

    def refresh(self, picks: dict[int, _Candidate], resident: npt.NDArray[np.int64]) -> None:
        """Prompts move as the interval of the peak shrinks and recomputation is placed."""
        swapped, self.swapped, self.prompts, self.stalls = self.swapped, {}, {}, {}
        for chosen in swapped.values():
            self.take(chosen, picks, resident)

    def _overhead(
        self, c: _Candidate, picks: dict[int, _Candidate], resident: npt.NDArray[np.int64]
    ) -> tuple[float, int]:
        """The swap time that nothing hides, and the prompt."""
        swap_time = self.link.in_us(c.memory_size)
        last = min(self.prompts.values(), default=c.first_bw_access)
        begin = min(c.first_bw_access, last) - 1
        full = np.flatnonzero(resident > self.limit_bytes)
        peak_end = int(full[-1]) if len(full) else -1
        if begin <= peak_end:
            conflicting = [self.stalls[s] for s, prompt in self.prompts.items() if prompt <= c.first_bw_access]
            return swap_time + max(conflicting, default=0.0), c.first_bw_access
        placed = {p.first_bw_access: p.recomp_time for p in picks.values()}
        prompt = begin + 1
        while swap_time > 0 and prompt - 1 > peak_end:
            prompt -= 1
            swap_time -= self.graph.ops[prompt].time_us + placed.get(prompt, 0.0)
        return max(0.0, swap_time), prompt


def _first_wanted(graph: Graph, plan: Plan) -> dict[int, int]:
    """Per storage: the first op, after its idle gap began, that reads it or before which a rerun does."""
    wanted: dict[int, int] = {}
    stage = len(graph.ops)
    for run in reversed(lower(graph, plan).runs):
        again = run.kind is RunKind.RERUN
        stage = stage if again else run.op
        op = graph.ops[run.op]
        for v in rerun_reads(op) if again else op.inputs:
            storage = graph.values[v].storage
            after = liveness(graph)[storage].idle_after
            if after is not None and stage > after:
                wanted[storage] = stage
    return wanted


def _moves(graph: Graph, prompts: dict[int, int], wanted: dict[int, int], link: HostLink) -> list[Eviction]:
    """Each swap with boundaries: gone when its copy is estimated to be done, back from its prompt on."""
    moves = []
    for storage, prompt in prompts.items():
        after, before = liveness(graph)[storage].idle_after, wanted[storage]
        assert after is not None
        done_us = graph.elapsed_us[after + 1] + link.out_us(graph.storages[storage].nbytes)
        back = max(after + 1, min(prompt, before))
        gone = min(back, max(after + 1, int(np.searchsorted(graph.elapsed_us, done_us))))
        moves.append(
            Eviction(
                storage=storage,
                free_after=after,
                restore_before=before,
                how=Restore.OFFLOAD,
                gone_before=gone,
                back_before=back,
            )
        )
    return moves


def _candidate(graph: Graph, storage: int) -> _Candidate:
    """Algorithm D, with the sources the paper leaves open: graph inputs and other candidates."""
    recomp_graph = recomputation(graph, storage, set(candidates(graph)).__contains__)
    sources, time = set(recomp_graph.sources), recomp_graph.time_us(graph)
    live = liveness(graph)[storage]
    assert live.idle_until is not None
    last = live.last_bw_access if live.last_bw_access is not None else live.idle_until
    nbytes = graph.storages[storage].nbytes
    return _Candidate(storage, nbytes, live.idle_until, last, sources, time, time, live.inactive_us)


def _update_picks(picks: dict[int, _Candidate], chosen: _Candidate) -> int:
    """Algorithm E: earlier picks that start from `chosen` start from its sources now."""
    recomp_cnt = 1
    for pick in picks.values():
        if chosen.storage in pick.recomp_srcs:
            pick.recomp_srcs = (pick.recomp_srcs - {chosen.storage}) | chosen.recomp_srcs
            pick.recomp_time += chosen.recomp_time
            recomp_cnt += 1
    return recomp_cnt


def _update_candidates(
    remaining: dict[int, _Candidate], picks: dict[int, _Candidate], chosen: _Candidate, recomp_cnt: int
) -> None:
    """Algorithm F: what the choice means for everyone still to be chosen."""
    for x in remaining.values():
        if chosen.storage in x.recomp_srcs:
            if not chosen.first_bw_access <= x.first_bw_access <= chosen.last_bw_access:
                x.recomp_srcs = (x.recomp_srcs - {chosen.storage}) | chosen.recomp_srcs
                x.recomp_time += chosen.recomp_time
            from_x = sum(x.storage in pick.recomp_srcs for pick in picks.values())
            x.total_recomp_time = x.recomp_time * (1 + from_x)
        if x.storage in chosen.recomp_srcs:
            x.total_recomp_time = recomp_cnt * x.recomp_time


def _resident_bytes(graph: Graph) -> npt.NDArray[np.int64]:
    """Algorithm G: bytes resident at every op, without workspaces and without what a recomputation needs."""
    resident = np.full(len(graph.ops), graph.start_bytes, dtype=np.int64)
    for storage in graph.storages:
        made, readers = graph.maker[storage.id], graph.readers[storage.id]
        if made is None:
            continue
        last = readers[-1] if readers else made
        end = len(graph.ops) if storage.id in graph.held_storages else last + 1
        resident[made:end] += storage.nbytes
    return resident


def _forget_while_idle(graph: Graph, resident: npt.NDArray[np.int64], storage: int) -> None:
    live = liveness(graph)[storage]
    assert live.idle_after is not None
    assert live.idle_until is not None
    resident[live.idle_after + 1 : live.idle_until] -= graph.storages[storage].nbytes
