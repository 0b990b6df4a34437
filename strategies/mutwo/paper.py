"""μ-TWO's Algorithms B, D, E, F and G to the letter, for `mutwo:faithful=true`. See `strategies.mutwo.greedy`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.analysis import candidates, liveness
from planner.ir import Graph
from planner.plan import recomputation


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

    @property
    def recompute_ratio(self) -> float:
        return self.memory_size / self.total_recomp_time if self.total_recomp_time > 0 else float("inf")


def paper_picks(graph: Graph, limit_bytes: int) -> list[int]:
    """Algorithm B without swapping: the picks until Algorithm G's estimate is under the limit."""
    remaining = {s: _candidate(graph, s) for s in candidates(graph)}
    picks: dict[int, _Candidate] = {}
    resident = _resident_bytes(graph)
    while remaining and resident.max(initial=0) > limit_bytes:
        chosen = max(remaining.values(), key=lambda c: (c.recompute_ratio, -c.storage))
        del remaining[chosen.storage]
        recomp_cnt = _update_picks(picks, chosen)
        picks[chosen.storage] = chosen
        _update_candidates(remaining, picks, chosen, recomp_cnt)
        _forget_while_idle(graph, resident, chosen.storage)
    return list(picks)


def _candidate(graph: Graph, storage: int) -> _Candidate:
    """Algorithm D, with the sources the paper leaves open: graph inputs and other candidates."""
    recomp_graph = recomputation(graph, storage, set(candidates(graph)).__contains__)
    sources, time = set(recomp_graph.sources), recomp_graph.time_us(graph)
    live = liveness(graph)[storage]
    assert live.idle_until is not None
    last = live.last_bw_access if live.last_bw_access is not None else live.idle_until
    return _Candidate(storage, graph.storages[storage].nbytes, live.idle_until, last, sources, time, time)


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
