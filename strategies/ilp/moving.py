"""The program with a third choice: a storage that is kept may be on the host meanwhile.

To K, A and L of `strategies.ilp.program` come, for every storage x with an idle gap, F_x ≤ K_x "x is moved to the
host", and at every moment k in that gap U_{x,k} "it is gone by then" and V_{x,k} "its way back has begun": V ≤ U ≤ F,
both growing with k. U - V is absent from memory. A rerun by moment k that reads x finds it back: V ≥ A + U - 1.

X_k is when the op at moment k starts: after X_{k-1}, the ops and reruns in between, and the time that they wait, which
is part of the objective. A lane does one copy at a time, so between an op p and moment k there is time for all copies
out that begin after p and are done by k; and between moment j and an op q for all copies back that begin after j and
are awaited by q. Every plan that recomputes an op at most once, at its first need, and moves an activation at
most once, and keeps what is too small to matter, is a point of this program with the same extra time: its optimum is a
lower bound for that class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from planner.analysis import liveness, movable, rerun_reads
from planner.host_link import HostLink
from strategies.ilp.linear import ONE, Floats, Ints, Linear, SparseModel, total
from strategies.ilp.program import StagedProgram
from strategies.ilp.reduction import NEVER, SMALL_SHARE, Reduction
from strategies.ilp.small import Small

FEW_ROWS = 5  # ops between two moments that get time rows of their own before any are known to matter


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A storage that may be moved: idle from `freed` to `first`, read by the reruns of `readers`."""

    storage: int
    nbytes: int
    freed: int
    first: int
    readers: tuple[int, ...]


Away = list[tuple[Parcel, int, int]]  # what may be away at a moment, with its U and V


def parcels(reduction: Reduction, *, step_bytes: int) -> tuple[tuple[Parcel, ...], tuple[Parcel, ...]]:
    """What the program decides to move, and what is too small to: the bound leaves its bytes out while it idles."""
    large: list[Parcel] = []
    small: list[Parcel] = []
    readers = _rerun_readers(reduction)
    for storage in movable(reduction.graph):
        if storage in reduction.small:
            continue  # which the program leaves out already
        live, nbytes = liveness(reduction.graph)[storage], reduction.graph.storages[storage].nbytes
        assert live.idle_after is not None
        assert live.idle_until is not None
        parcel = Parcel(
            storage=storage,
            nbytes=nbytes,
            freed=live.idle_after,
            first=live.idle_until,
            readers=tuple(readers.get(storage, ())),
        )
        is_small = storage not in reduction.blocks and nbytes <= SMALL_SHARE * step_bytes
        (small if is_small else large).append(parcel)
    return tuple(large), tuple(small)


def _rerun_readers(reduction: Reduction) -> dict[int, list[int]]:
    """Per storage: the nodes that read it when rerun."""
    graph, readers = reduction.graph, dict[int, list[int]]()
    for node in reduction.nodes.values():
        reads = (graph.values[v].storage for op in node.merged for v in rerun_reads(graph.ops[op]))
        for storage in dict.fromkeys(reads):
            readers.setdefault(storage, []).append(node.op)
    return readers


class MovingProgram(StagedProgram):
    """The program for one set of moments; `starts` and `ends` are ops from and to which copies are counted."""

    def __init__(
        self,
        reduction: Reduction,
        moments: Iterable[int],
        inner: Iterable[tuple[int, int]],
        *,
        link: HostLink,
        step_bytes: int,
        in_place: bool,
        starts: Iterable[int] = (),
        ends: Iterable[int] = (),
    ) -> None:
        self.link = link
        self.parcels, self.small = parcels(reduction, step_bytes=step_bytes)
        self.moved: dict[int, int] = {}  # F
        self.gone: dict[tuple[int, int], int] = {}  # U
        self.back: dict[tuple[int, int], int] = {}  # V
        self.clock: list[int] = []  # X
        self.waited: list[int] = []  # in the stage up to each moment
        super().__init__(reduction, moments, inner, in_place=in_place)
        self.whole_us = max(reduction.graph.time_us, 1e-9)
        self.out_share = {p.storage: link.out_us(p.nbytes) / self.whole_us for p in self.parcels}
        self.in_share = {p.storage: link.in_us(p.nbytes) / self.whole_us for p in self.parcels}
        first = len(self.cost)
        self._reruns_when_needed()
        self._time_rows(set(starts), set(ends))
        self.times = np.arange(first, len(self.cost))  # variables that are times, in units of the whole step

    # -- what is asked ----------------------------------------------------------------------------------------

    def at(self, budget_bytes: int, excluded: Iterable[frozenset[int]] = ()) -> SparseModel:
        model = super().at(budget_bytes, excluded)
        most = model.most.copy()
        copies_us = sum(self.link.out_us(p.nbytes) + self.link.in_us(p.nbytes) for p in self.parcels)
        most[self.times] = 3.0 + copies_us / self.whole_us  # later than any schedule without idle waiting ends
        return replace(model, most=most)

    def in_parts(self, model: SparseModel) -> SparseModel:
        """The program where a moment may have a part of a storage away: only what is kept and moved is whole."""
        integer = model.integer.copy()
        integer[[*self.gone.values(), *self.back.values()]] = False
        return replace(model, integer=integer)

    def chosen(self, point: Floats) -> set[int]:
        """The storages that a solution moves, and has away at some moment."""
        away = {x for (x, k), u in self.gone.items() if point[u] - point[self.back[x, k]] > 0.3}
        return {x for x, variable in self.moved.items() if point[variable] > 0.5 and x in away}

    # -- memory -------------------------------------------------------------------------------------------------

    def _idle_small(self) -> tuple[Small, ...]:
        return ()  # they may be moved instead, which takes no time that is counted

    def _memory(self, k: int, fixed: Ints) -> Linear:
        return self._less_absent(super()._memory(k, fixed), k)

    def _inner_memory(self, position: int, op: int) -> Linear:
        # Boundaries stand between stages: a rerun before an op misses what the op misses.
        return self._less_absent(super()._inner_memory(position, op), self.stage(position))

    def _less_absent(self, memory: Linear, k: int) -> Linear:
        position = self.moments[k]
        for parcel in self.small:
            memory.constant -= parcel.nbytes if parcel.freed < position < parcel.first else 0
        for parcel in self.parcels:
            if parcel.freed < position < parcel.first:
                key = (parcel.storage, k)
                if key not in self.gone:
                    self._add_moment(parcel, k)
                memory.terms[self.gone[key]] = -float(parcel.nbytes)  # U - V is absent
                memory.terms[self.back[key]] = float(parcel.nbytes)
        return memory

    def _add_moment(self, parcel: Parcel, k: int) -> None:
        x = parcel.storage
        if x not in self.moved:
            self.moved[x] = self._variable(integer=True)
            if x in self.keep:
                self._at_least(self.k(x), _variable(self.moved[x]))
        self.gone[x, k], self.back[x, k] = self._variable(integer=True), self._variable(integer=True)
        gone, back = _variable(self.gone[x, k]), _variable(self.back[x, k])
        self._at_least(_variable(self.moved[x]), gone)
        self._at_least(gone, back)
        if (x, k - 1) in self.gone:
            self._at_least(gone, _variable(self.gone[x, k - 1]))
            self._at_least(back, _variable(self.back[x, k - 1]))
        for w in parcel.readers:
            reruns = self.a(w, k)
            if reruns.terms or reruns.constant:
                self._at_least(total((1.0, back), (1.0, ONE)), total((1.0, reruns), (1.0, gone)))

    # -- time ---------------------------------------------------------------------------------------------------

    def _reruns_when_needed(self) -> None:
        """A rerun stands at its first need: were it free to come early, it would seem to hide copies."""
        readers: dict[int, dict[int, None]] = {}
        for node in self.reduction.nodes.values():
            for maker, _ in node.sources:
                readers.setdefault(maker, {})[node.op] = None
        for node in self.reduction.nodes.values():
            own = self.stage(node.direct) if node.direct != NEVER else self.tail + 1
            for k in range(self.stage(node.earliest), min(own, self.tail + 1)):
                if self.a(node.op, k).terms:
                    causes = total(*((1.0, self.a(w, k)) for w in readers.get(node.op, ())))
                    self._at_least(causes, self.a(node.op, k))

    def _time_rows(self, starts: set[int], ends: set[int]) -> None:
        if not self.moved:
            return
        self._add_clocks()
        away_at = self._away_at()
        freed = sorted({p.freed for p in self.parcels})
        first = sorted({p.first for p in self.parcels})
        for k, position in enumerate(self.moments):
            before = [p for p in freed if p < position]
            for p in sorted({-1, *_spread(before), *(m for m in self.moments if m < position), *starts}):
                if p < position:
                    self._out_row(p, k, away_at[k])
        for j, position in enumerate(self.moments):
            later = [q for q in first if q > position]
            for q in sorted({*_spread(later), *(m for m in self.moments if m > position), *ends}):
                if q > position and self.stage(q) < len(self.moments):
                    self._in_row(j, q, away_at[j])

    def _add_clocks(self) -> None:
        """X_k after X_{k-1}, what runs in between, and the time waited, which is part of the objective."""
        elapsed = self.reduction.graph.elapsed_us
        for k, position in enumerate(self.moments):
            self.waited.append(self._variable())
            self.cost[self.waited[k]] = self.whole_us
            self.clock.append(self._variable())
            since = elapsed[self.moments[k - 1]] if k else 0.0
            latest = Linear((elapsed[position] - since) / self.whole_us, {self.waited[k]: 1.0})
            if k:
                latest.add(_variable(self.clock[k - 1]))
            for node in self.reduction.nodes.values():
                now = total((1.0, self.a(node.op, k)), (-1.0, self.a(node.op, k - 1)))
                if now.terms or now.constant:
                    latest.add(now, node.time_us / self.whole_us)
            self._at_least(latest, _variable(self.clock[k]))

    def _end_of(self, p: int) -> Linear:
        """No op p ends sooner than this: the moment before it, and the ops since, itself included."""
        elapsed = self.reduction.graph.elapsed_us
        j = self.stage(p + 1) - 1  # the last moment at or before p
        if j < 0:
            return Linear(elapsed[p + 1] / self.whole_us)
        return Linear((elapsed[p + 1] - elapsed[self.moments[j]]) / self.whole_us, {self.clock[j]: 1.0})

    def _start_of(self, q: int) -> Linear:
        """No op q starts later than this: the moment after it, less the ops up to there."""
        elapsed, k = self.reduction.graph.elapsed_us, self.stage(q)
        return Linear(-(elapsed[self.moments[k]] - elapsed[q]) / self.whole_us, {self.clock[k]: 1.0})

    def _away_at(self) -> list[Away]:
        """Per moment: what may be away then, with its U and V."""
        away: list[Away] = [[] for _ in self.moments]
        parcel_of = {parcel.storage: parcel for parcel in self.parcels}
        for (storage, k), gone in self.gone.items():
            away[k].append((parcel_of[storage], gone, self.back[storage, k]))
        return away

    def _out_row(self, p: int, k: int, away: Away) -> None:
        """Copies out that begin after op p and are done by moment k fit in between."""
        copies = {gone: self.out_share[parcel.storage] for parcel, gone, _ in away if parcel.freed >= p}
        if copies:
            between = total((1.0, _variable(self.clock[k])), (-1.0, self._end_of(p)))
            self._at_least(between, Linear(0.0, copies))

    def _in_row(self, j: int, q: int, away: Away) -> None:
        """Copies back that begin after moment j and are awaited by op q fit in between."""
        copies: dict[int, float] = {}
        for parcel, gone, back in away:
            if parcel.first <= q:
                copies[gone] = self.in_share[parcel.storage]
                copies[back] = -copies[gone]
        if copies:
            between = total((1.0, self._start_of(q)), (-1.0, self._end_of(self.moments[j])))
            self._at_least(between, Linear(0.0, copies))


def _variable(index: int) -> Linear:
    return Linear(0.0, {index: 1.0})


def _spread(ops: list[int]) -> list[int]:
    """A few of them, from the first to the last."""
    return [ops[int(i)] for i in np.linspace(0, len(ops) - 1, FEW_ROWS)] if ops else []
