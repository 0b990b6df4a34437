"""The simulator's incremental form: peak and recompute time while storages are dropped and kept one by one.

It holds for plans of `planner.plan.recompute_once`, and agrees there with `simulate(lower(...))` to the byte.
A *stage* is an op of the original order together with the reruns placed just before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.analysis import candidates, idle_after, movable, rerun_reads, temporaries
from planner.ir import Graph, Op
from planner.plan import NEVER_STAGE, Plan, recompute_once, rerun_stages
from planner.schedule import overwritten

NONE = -1


@dataclass(slots=True)
class _Span:
    """When a storage is resident, in stages: from `first` to `end`, and again from `again` to `again_end`."""

    first: int
    end: int
    again: int = NONE
    again_end: int = NONE


class Incremental:
    """The set of dropped storages, with the exact peak and recompute time that it means.

    It starts with the temporaries of the forward dropped (but for those in `kept`) and every activation kept.
    """

    def __init__(
        self, graph: Graph, dropped: Iterable[int] = (), *, kept: Collection[int] = (), in_place: bool = True
    ) -> None:
        self.graph = graph
        self.in_place = in_place
        self._nbytes = [storage.nbytes for storage in graph.storages]
        self._dropped = bytearray(len(graph.storages))
        self._freed_after = _freed_after(graph)
        self._tables()
        self._peak: tuple[int, int] | None = None
        self._recompute_us: float | None = None
        self._carried = np.full(len(graph.ops) + 1, graph.start_bytes, dtype=np.int64)
        self._local = np.zeros(len(graph.ops), dtype=np.int64)
        for storage in (*(t for t in temporaries(graph) if t not in kept), *dropped):
            self._dropped[storage] = 1
        self._start_over()

    # -- what strategies ask --------------------------------------------------------------------------------

    @property
    def dropped(self) -> list[int]:
        """The storages dropped now, temporaries included, in id order."""
        return [s for s, flag in enumerate(self._dropped) if flag]

    def is_dropped(self, storage: int) -> bool:
        return bool(self._dropped[storage])

    def peak(self) -> tuple[int, int]:
        """The peak in bytes and the stage (op id) where it is first reached."""
        if self._peak is None:
            totals = self._carried[:-1] + self._local
            stage = int(totals.argmax())
            self._peak = (int(totals[stage]), stage)
        return self._peak

    def stage_bytes(self) -> npt.NDArray[np.int64]:
        """The largest bytes live at any moment of each stage."""
        return self._carried[:-1] + self._local

    @property
    def recompute_us(self) -> float:
        """Time of all reruns."""
        if self._recompute_us is None:
            self._recompute_us = float(self._rerun_us.sum())
        return self._recompute_us

    def rerun_stage(self, op: int) -> int:
        """The stage in which `op` is rerun, or NEVER_STAGE."""
        return self._stage[op]

    def need(self, storage: int) -> int:
        """The stage that would want `storage` back first if it were dropped, or moved to the host."""
        return min(self._need(v) for v in self.graph.values_in[storage])

    def freed_after(self, storage: int) -> int:
        """The stage after which `storage` idles, of what may be dropped or moved to the host."""
        return self._freed_after[storage]

    def stage_us(self) -> npt.NDArray[np.float64]:
        """Run time of each stage."""
        return self._stage_us.copy()

    def plan(self) -> Plan:
        """The plan that this set means."""
        return recompute_once(
            self.graph, self.dropped, kept=[s for s in temporaries(self.graph) if not self._dropped[s]]
        )

    # -- changes --------------------------------------------------------------------------------------------

    def drop(self, storage: int) -> None:
        """Drop a storage that is kept."""
        self._flip(storage, 1)

    def keep(self, storage: int) -> None:
        """Keep a storage that is dropped."""
        self._flip(storage, 0)

    def _flip(self, storage: int, flag: int) -> None:
        assert self._dropped[storage] != flag
        self._dropped[storage] = flag
        self._peak = self._recompute_us = None
        dirty_storages, dirty_stages = {storage}, set[int]()
        self._propagate(storage, dirty_storages, dirty_stages)
        for s in dirty_storages:
            self._respan(s, dirty_stages)
        for stage in dirty_stages:
            self._local[stage] = self._profile(stage)
            self._stage_us[stage] = self._us(stage)

    def _propagate(self, storage: int, dirty_storages: set[int], dirty_stages: set[int]) -> None:
        """Move reruns to the stages where they are needed now; later ops first, since needs flow backwards."""
        producer = self._producer
        waiting = {producer[v] for v in self.graph.values_in[storage]}
        heap = [-op for op in waiting]
        heapq.heapify(heap)
        while heap:
            op = -heapq.heappop(heap)
            waiting.discard(op)
            old, new = self._stage[op], self._wanted_stage(op)
            if old == new:
                continue
            self._move(op, old, new)
            dirty_stages.update(stage for stage in (old, new, op) if stage != NEVER_STAGE)
            dirty_storages.update(self.graph.makes[op])
            dirty_storages.update(self._rerun_storages[op])  # a saved generator state among them
            for v in self._rerun_values[op]:
                maker = producer[v]
                if self._dropped[self._storage[v]] and maker not in waiting:
                    waiting.add(maker)
                    heapq.heappush(heap, -maker)

    def _move(self, op: int, old: int, new: int) -> None:
        if old != NEVER_STAGE:
            self._chains[old].remove(op)
            self._rerun_us[op] = 0.0
        if new != NEVER_STAGE:
            self._chains.setdefault(new, []).append(op)
            self._chains[new].sort()
            self._rerun_us[op] = self._time_us[op]
        self._stage[op] = new

    def _wanted_stage(self, op: int) -> int:
        lost = (v for v in self.graph.ops[op].outputs if self._lost(v, op))
        return min((self._need(v) for v in lost), default=NEVER_STAGE)

    def _lost(self, value: int, maker: int) -> bool:
        """Whether `value` goes with its storage: a view made after the eviction is made in the clone."""
        storage = self._storage[value]
        return bool(self._dropped[storage]) and maker <= self._freed_after[storage]

    def _need(self, value: int) -> int:
        """The first stage after its storage is freed that reads `value`: a direct reader, or a rerun."""
        reruns = min((self._stage[r] for r in self._rerun_readers[value]), default=NEVER_STAGE)
        return min(self._first_direct[value], reruns)

    # -- residency ------------------------------------------------------------------------------------------

    def _respan(self, storage: int, dirty_stages: set[int]) -> None:
        old, new = self._spans[storage], self._span(storage)
        if old == new:
            return
        for span, sign in ((old, -1), (new, 1)):
            if span is not None:
                self._add(storage, span, sign)
                dirty_stages.update((span.first, span.end, span.again, span.again_end))
        self._spans[storage] = new
        dirty_stages.discard(NONE)
        dirty_stages.discard(len(self.graph.ops))

    def _add(self, storage: int, span: _Span, sign: int) -> None:
        nbytes = sign * self._nbytes[storage]
        self._carried[span.first + 1 : span.end + 1] += nbytes
        if span.again != NONE:
            self._carried[span.again + 1 : span.again_end + 1] += nbytes

    def _span(self, storage: int) -> _Span | None:
        if storage in self._rng_op:
            op = self._rng_op[storage]
            return _Span(op, self._stage[op]) if self._stage[op] != NEVER_STAGE else None
        made = self.graph.maker[storage]
        if made is None:
            return None
        if storage in self.graph.held_storages:
            return _Span(made, len(self.graph.ops))
        readers = self.graph.readers[storage]
        last = readers[-1] if readers else made
        reruns = [stage for r in self._storage_rerun_readers[storage] if (stage := self._stage[r]) != NEVER_STAGE]
        if not self._dropped[storage]:
            return _Span(made, max(last, *reruns) if reruns else last)
        freed = self._freed_after[storage]
        needs = [*reruns, *([last] if last > freed else [])]
        return _Span(made, freed, self._stage[made], max(needs)) if needs else _Span(made, freed)

    # -- one stage ------------------------------------------------------------------------------------------

    def _us(self, stage: int) -> float:
        """Its op and the reruns placed before it."""
        return self._time_us[stage] + sum(self._time_us[op] for op in self._chains.get(stage, ()))

    def _profile(self, stage: int) -> int:
        """The largest bytes within a stage, above what is carried into it."""
        chain = self._chains.get(stage)
        if not chain and not self._intricate[stage]:
            return self._plain_local[stage]
        return max(0, *(nbytes for _, nbytes in self._run_bytes(stage)))

    def busiest_run(self, stage: int) -> int:
        """The op whose run in `stage` sees the most bytes: the stage's own op, or a rerun placed before it."""
        return max(reversed(self._run_bytes(stage)), key=lambda run: run[1])[0]

    def _run_bytes(self, stage: int) -> list[tuple[int, int]]:
        """Per run of a stage: its op, and the bytes live during it above what is carried into the stage."""
        runs = [*self._chains.get(stage, ()), stage]
        live, seen = 0, []
        for op_id, dying in zip(runs, self._deaths(runs, stage), strict=True):
            op = self.graph.ops[op_id]
            into = overwritten(self.graph, op, dying) if self.in_place and dying else None
            if into is not None:
                live -= self._nbytes[into]
            fresh, copies = self._makes(op, stage)
            live += fresh
            seen.append((op_id, live + copies + op.workspace_bytes))
            live -= sum(self._nbytes[s] for s in dying if s != into)
        return seen

    def _makes(self, op: Op, stage: int) -> tuple[int, int]:
        """Bytes that running `op` in `stage` adds, and bytes of copies that vanish when it returns."""
        fresh = copies = 0
        for s in self.graph.makes[op.id]:
            span = self._spans[s]
            if op.id == stage or (span is not None and span.again == stage):
                fresh += self._nbytes[s]
            else:
                copies += self._nbytes[s]
        if op.rng_state is not None and op.id != stage:
            copies += self._nbytes[op.rng_state]  # where the generator stands, put back after the replay
        elif op.rng_state is not None and self._stage[op.id] != NEVER_STAGE:
            fresh += self._nbytes[op.rng_state]
        return fresh, copies

    def _deaths(self, runs: list[int], stage: int) -> list[list[int]]:
        """Per run of a stage: the storages whose last use it is."""
        last: dict[int, int] = {}
        for i, op in enumerate(runs):
            for s in self.graph.reads[op] if op == stage else self._rerun_storages[op]:
                last[s] = i
            for s in self.graph.makes[op]:
                last[s] = i
        deaths: list[list[int]] = [[] for _ in runs]
        for s, i in last.items():
            span = self._spans[s]
            if span is not None and stage in (span.end, span.again_end):
                deaths[i].append(s)
        return deaths

    # -- tables ---------------------------------------------------------------------------------------------

    def _tables(self) -> None:
        """What never changes: who reads what, and what a rerun reads."""
        graph = self.graph
        self._storage = [value.storage for value in graph.values]
        self._producer = [NONE if value.producer is None else value.producer for value in graph.values]
        self._time_us = [op.time_us for op in graph.ops]
        self._rng_op = {op.rng_state: op.id for op in graph.ops if op.rng_state is not None}
        self._rerun_values = [rerun_reads(op) for op in graph.ops]
        self._rerun_storages = [
            tuple(dict.fromkeys([*(self._storage[v] for v in values), *_state(op)]))
            for op, values in zip(graph.ops, self._rerun_values, strict=True)
        ]
        self._rerun_readers: list[list[int]] = [[] for _ in graph.values]
        self._storage_rerun_readers: list[list[int]] = [[] for _ in graph.storages]
        self._first_direct = [NEVER_STAGE] * len(graph.values)
        for op in reversed(graph.ops):
            for v in op.inputs:
                if op.id > self._freed_after[self._storage[v]]:
                    self._first_direct[v] = op.id
            for v in dict.fromkeys(self._rerun_values[op.id]):
                self._rerun_readers[v].append(op.id)
            for s in self._rerun_storages[op.id]:
                self._storage_rerun_readers[s].append(op.id)
        self._intricate = [bool(op.overwritable) or op.rng_state is not None for op in graph.ops]
        self._plain_local = [sum(self._nbytes[s] for s in graph.makes[op.id]) + op.workspace_bytes for op in graph.ops]

    def _start_over(self) -> None:
        """Everything that follows from the dropped set, from scratch."""
        graph = self.graph
        self._stage = rerun_stages(graph, self.dropped)
        self._chains: dict[int, list[int]] = {}
        for op, stage in enumerate(self._stage):
            if stage != NEVER_STAGE:
                self._chains.setdefault(stage, []).append(op)
        is_rerun = np.array(self._stage, dtype=np.int64) != NEVER_STAGE
        self._rerun_us = np.where(is_rerun, self._time_us, 0.0)  # per op: what its rerun takes, 0 without one
        self._spans = [self._span(storage.id) for storage in graph.storages]
        for storage, span in enumerate(self._spans):
            if span is not None:
                self._add(storage, span, 1)
        self._local[:] = [self._profile(op.id) for op in graph.ops]
        self._stage_us = np.array([self._us(op.id) for op in graph.ops])


def _state(op: Op) -> tuple[int, ...]:
    return () if op.rng_state is None else (op.rng_state,)


def _freed_after(graph: Graph) -> list[int]:
    """Per storage: the op after which it is freed when dropped or moved, or NONE if it may not be."""
    freed = [NONE] * len(graph.storages)
    for storage in (*candidates(graph), *temporaries(graph), *movable(graph)):
        freed[storage] = idle_after(graph, storage)
    return freed
