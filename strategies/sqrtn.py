"""`sqrtn`: segments. Keep what crosses a few cuts of the forward, recompute each segment as a whole.

Chen, Xu, Zhang, Guestrin: "Training Deep Nets with Sublinear Memory Cost", 2016. With n equal layers and k
segments memory is about n/k + k layers, least at k = √n. Real layers are not equal, so cuts are placed where
the activation bytes divide evenly and few bytes cross, and k is searched around √n.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from planner.analysis import candidates, idle_after, temporaries
from planner.errors import StrategyError
from planner.ir import Graph, Phase
from planner.plan import Plan, recompute_once
from planner.solve import Problem, cheapest


@dataclass(frozen=True, slots=True, kw_only=True)
class SqrtN:
    """`segments` fixes k; without it k is searched. `snap` moves a cut to where the fewest bytes cross nearby."""

    name: ClassVar[str] = "sqrtn"
    segments: int | None = None
    snap: bool = True

    def __post_init__(self) -> None:
        if self.segments is not None and self.segments < 1:
            raise StrategyError(f"segments={self.segments}: there must be at least one")

    def plan(self, problem: Problem) -> Plan:
        if problem.unplanned.peak_bytes <= problem.budget_bytes:
            return Plan()
        deadline = time.perf_counter() + problem.time_limit_s
        forward = _Forward(problem.graph)
        counts = [self.segments] if self.segments is not None else forward.counts_around_sqrt()
        plans = forward.plans(counts, snap=self.snap, most_us=problem.most_recompute_us)
        return cheapest(problem, plans, deadline=deadline)


class _Forward:
    """The forward of every round, and the segments into which a number of cuts divides them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        rounds = sorted({op.round for op in graph.ops if op.phase is Phase.FORWARD})
        self.rounds = [_Round(graph, r) for r in rounds]

    def counts_around_sqrt(self) -> list[int]:
        """Numbers of segments worth trying, √n first: every one up to 2√n, then ever wider steps up to n."""
        n = max((len(r.activations) for r in self.rounds), default=0)
        root = max(2, math.isqrt(n))
        wide = (round(2 * root * 1.3**i) for i in range(1, 12))
        return [*sorted(range(1, 2 * root + 1), key=lambda k: abs(k - root)), *(k for k in wide if k < n)]

    def plans(self, counts: Iterable[int], *, snap: bool, most_us: float = math.inf) -> Iterator[Plan]:
        """The plans of several numbers of segments, each one once; none that surely recomputes for over `most_us`.

        Each keeps what crosses a cut, and every round's last segment, whose backward comes first.
        """
        seen: set[tuple[tuple[int, ...], ...]] = set()
        for count in counts:
            cuts = tuple(r.cuts(count, snap=snap) for r in self.rounds)
            if cuts in seen:
                continue
            seen.add(cuts)
            kept = {s for r, places in zip(self.rounds, cuts, strict=True) for s in r.kept(places)}
            dropped = [s for s in candidates(self.graph) if s not in kept]
            if self._least_us(dropped) <= most_us:
                yield recompute_once(self.graph, dropped, kept=kept)

    def _least_us(self, dropped: Iterable[int]) -> float:
        """Recomputing takes no less than this: whatever makes a dropped activation runs again."""
        makers = {self.graph.maker[s] or 0 for s in dropped}
        return sum(self.graph.ops[op].time_us for op in makers)


class _Round:
    """One round's forward as a line of positions, with what crosses each of them."""

    def __init__(self, graph: Graph, number: int) -> None:
        self.graph = graph
        ops = [op.id for op in graph.ops if op.phase is Phase.FORWARD and op.round == number]
        self.position = {op: i for i, op in enumerate(ops)}
        self.activations = [s for s in candidates(graph) if graph.maker[s] in self.position]
        self.spans = [
            self._span(s) for s in (*self.activations, *temporaries(graph)) if graph.maker[s] in self.position
        ]
        self.crossing = self._crossing()
        # Behind the last position that anything crosses lies no segment, so a cut there would cut nothing off.
        self.last = max((p for p, nbytes in enumerate(self.crossing) if nbytes), default=0)
        self.saved = self._saved()

    def _span(self, storage: int) -> tuple[int, int, int]:
        """(storage, position that makes it, position of its last reader in the round before it idles)."""
        made = self.position[self.graph.maker[storage] or 0]
        return storage, made, self.position.get(idle_after(self.graph, storage), made)

    def _crossing(self) -> list[int]:
        """Per position: bytes that later forward ops still read after the op there has run."""
        change = [0] * (len(self.position) + 1)
        for storage, first, last in self.spans:
            change[first] += self.graph.storages[storage].nbytes
            change[last] -= self.graph.storages[storage].nbytes
        return list(accumulate(change[:-1]))

    def _saved(self) -> list[int]:
        """Per position: activation bytes made up to and including it."""
        made_at = [0] * len(self.position)
        for storage in self.activations:
            made_at[self.position[self.graph.maker[storage] or 0]] += self.graph.storages[storage].nbytes
        return list(accumulate(made_at))

    def cuts(self, segments: int, *, snap: bool) -> tuple[int, ...]:
        """At most `segments - 1` positions that divide the activation bytes evenly."""
        total = self.saved[-1] if self.saved else 0
        places = (min(bisect_left(self.saved, total * i / segments), self.last) for i in range(1, segments))
        half = max(1, len(self.position) // (2 * segments))
        return tuple(sorted({self._cheapest_near(p, half) if snap else p for p in places}))

    def _cheapest_near(self, position: int, half: int) -> int:
        low, high = max(0, position - half), min(self.last, position + half)
        return min(range(low, high + 1), key=lambda p: (self.crossing[p], abs(p - position)))

    def kept(self, cuts: tuple[int, ...]) -> list[int]:
        return [s for s, made, last in self.spans if _crosses(cuts, made, last)]


def _crosses(cuts: tuple[int, ...], made: int, last: int) -> bool:
    following = bisect_left(cuts, made)
    return following == len(cuts) or cuts[following] < last
