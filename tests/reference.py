"""Oracles, written apart from what they check: slow, simple, and without any of the planner's own machinery."""

from __future__ import annotations

from itertools import chain, combinations

from planner.analysis import candidates
from planner.host_link import HostLink
from planner.ir import Graph, Rerun
from planner.plan import Plan, recompute_once
from planner.schedule import COPY_IN, COPY_OUT, Free, Launch, Run, RunKind, Schedule, Wait, lower


def naive_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Live bytes at every step, adding up a set of storages afresh each time."""
    live = {v.storage for v in graph.values if v.producer is None}
    totals = []
    for step in schedule.steps:
        extra = 0
        if isinstance(step, Free):
            live.remove(step.storage)
        elif isinstance(step, Launch):
            assert (step.storage in live) == (step.lane == COPY_OUT)
            live.add(step.storage)
        elif isinstance(step, Run):
            op = graph.ops[step.op]
            extra = op.workspace_bytes
            live -= {step.into}
            made = [graph.values[v].storage for v in op.outputs if graph.values[v].base is None]
            extra += sum(graph.storages[s].nbytes for s in made if s in live)
            live.update(made)
            if step.kind is RunKind.ORIGINAL_SAVING_RNG:
                live.add(op.rng_state)
            if step.kind is RunKind.RERUN and op.rng_state is not None:
                extra += graph.storages[op.rng_state].nbytes  # the generator's own state, kept aside meanwhile
        totals.append(sum(graph.storages[s].nbytes for s in live) + extra)
    return totals


def naive_host_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Bytes held on the host after every step."""
    host, totals = set(), []
    for step in schedule.steps:
        if isinstance(step, Launch) and step.lane == COPY_OUT:
            assert step.storage not in host
            host.add(step.storage)
        if isinstance(step, Wait) and step.lane == COPY_IN:
            host.remove(step.storage)
        totals.append(sum(graph.storages[s].nbytes for s in host))
    return totals


def naive_end_us(graph: Graph, schedule: Schedule, link: HostLink | None) -> float:
    """When a schedule ends: the longest path through its steps, where a copy follows its launch and its lane."""
    ends: list[float] = [0.0]  # of the steps, each after the one before
    copies: dict[tuple, float] = {}
    for i, step in enumerate(schedule.steps):
        end = ends[-1]
        if isinstance(step, Run):
            end += graph.ops[step.op].time_us
        if isinstance(step, Launch):
            assert link is not None
            before = [s for s in schedule.steps[:i] if isinstance(s, Launch) and s.lane == step.lane]
            ready = max(end, copies[step.lane, before[-1].storage, len(before) - 1] if before else 0.0)
            speed = link.out_bytes_per_s if step.lane == COPY_OUT else link.in_bytes_per_s
            took = link.latency_us + 1e6 * graph.storages[step.storage].nbytes / speed
            copies[step.lane, step.storage, len(before)] = ready + took
        if isinstance(step, Wait):
            end = max(end, [us for (lane, s, _), us in copies.items() if (lane, s) == (step.lane, step.storage)][-1])
        ends.append(end)
    return ends[-1]


class Execution:
    """A symbolic run of a schedule: every value is the term that computes it.

    A random op's term carries the draw it saw, a mutated storage a version, so that a wrong mask, a second
    update or a stale parameter shows as a different term.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.terms: dict[int, object] = {v.id: ("input", v.name) for v in graph.values if v.producer is None}
        self.version: dict[int, tuple] = {}
        self.draws = 0
        self.saved_draws: dict[int, int] = {}
        self.original: dict[int, tuple] = {}  # op -> the terms of its inputs and outputs at its original run
        self.rerun_terms: list[tuple[int, tuple]] = []
        self.leaving: dict[int, tuple] = {}  # storage being copied out -> its terms and version
        self.host: dict[int, tuple] = {}
        self.coming: dict[int, tuple] = {}

    def run(self, schedule: Schedule) -> Execution:
        for step in schedule.steps:
            if isinstance(step, Free):
                assert step.storage not in self.leaving, "freed while it is copied"
                self._forget(step.storage)
            elif isinstance(step, Launch):
                self._launch(step)
            elif isinstance(step, Wait):
                self._wait(step)
            else:
                self._run(step)
        assert not {**self.leaving, **self.host, **self.coming}, "left on the host, or on the way"
        return self

    def _launch(self, step: Launch) -> None:
        storage = step.storage
        if step.lane == COPY_OUT:
            held = {v: self.terms[v] for v in self.graph.values_in[storage] if v in self.terms}
            assert held, "nothing to copy"
            self.leaving[storage] = (held, self.version.get(storage, ()))
        else:
            self.coming[storage] = self.host.pop(storage)

    def _wait(self, step: Wait) -> None:
        storage = step.storage
        if step.lane == COPY_OUT:
            # Views made while it was copied are made of the same bytes: they come back too.
            held, version = self.leaving.pop(storage)
            assert version == self.version.get(storage, ()), "written to while it was copied"
            later = {v: self.terms[v] for v in self.graph.values_in[storage] if v in self.terms}
            self.host[storage] = ({**held, **later}, version)
        else:
            held, version = self.coming.pop(storage)
            assert version == self.version.get(storage, ()), "written to while it was away"
            self.terms.update(held)

    def _forget(self, storage: int) -> None:
        held = [v for v in self.graph.values_in[storage] if v in self.terms]
        state = [op.id for op in self.graph.ops if op.rng_state == storage]
        assert held or state, "freed twice"
        for v in held:
            del self.terms[v]

    def _read(self, value: int) -> object:
        assert value in self.terms, f"{self.graph.values[value].name} is not there"
        return self.terms[value], self.version.get(self.graph.values[value].storage, ())

    def _run(self, step: Run) -> None:
        op = self.graph.ops[step.op]
        again = step.kind is RunKind.RERUN
        skipped = set(op.mutates) if again and op.rerun is Rerun.WITHOUT_SIDE_EFFECT else set()
        # What a rerun leaves out must not matter: the term names only what both runs read.
        ignored = set(op.mutates) if op.rerun is Rerun.WITHOUT_SIDE_EFFECT else set()
        reads = tuple(self._read(v) for v in op.inputs if v not in ignored)
        draw = self._draw(step)
        if step.into is not None:
            self._forget(step.into)
        terms = tuple((op.name, i, reads, draw) for i in range(len(op.outputs)))
        for v in op.mutates:
            if v not in skipped:
                storage = self.graph.values[v].storage
                self.version[storage] = (*self.version.get(storage, ()), op.name)
        self._keep(step, terms)
        if again:
            assert op.rerun is not Rerun.NEVER
            self.rerun_terms.append((op.id, terms))
        else:
            assert op.id not in self.original, "an original op ran twice"
            self.original[op.id] = terms

    def _draw(self, step: Run) -> int | None:
        op = self.graph.ops[step.op]
        if op.rerun is not Rerun.REPLAY_RNG:
            return None
        if step.kind is RunKind.RERUN:
            return self.saved_draws[op.id]
        self.draws += 1
        if step.kind is RunKind.ORIGINAL_SAVING_RNG:
            self.saved_draws[op.id] = self.draws
        return self.draws

    def _keep(self, step: Run, terms: tuple) -> None:
        op, values = self.graph.ops[step.op], self.graph.values
        resident = {values[v].storage for v in self.terms}
        for v, term in zip(op.outputs, terms, strict=True):
            if values[v].base is None and values[v].storage in resident and v in self.terms:
                assert self.terms[v] == term
            self.terms[v] = term


def subsets(items: tuple[int, ...]):
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def brute_force_optimum(graph: Graph, budget_bytes: int, *, in_place: bool = True) -> tuple[float, tuple] | None:
    """The least recompute time of any set of dropped activations that fits, and that set; None if none fits."""
    best = None
    for dropped in subsets(candidates(graph)):
        schedule = lower(graph, recompute_once(graph, dropped), in_place=in_place)
        if max(naive_bytes(graph, schedule)) > budget_bytes:
            continue
        cost = sum(graph.ops[s.op].time_us for s in schedule.steps if isinstance(s, Run) and s.kind is RunKind.RERUN)
        if best is None or cost < best[0]:
            best = (cost, dropped)
    return best


def unplanned(graph: Graph, *, in_place: bool = True) -> Schedule:
    return lower(graph, Plan(), in_place=in_place)


class NaiveAllocator:
    """PyTorch's caching allocator as lists that are searched from end to end, for both kinds of segments.

    A segment is a list of [bytes, owner]; owner None is free. `held` are the bytes of all segments.
    """

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: list[tuple[bool, list[list]]] = []

    def allocate(self, owner: int, nbytes: int) -> None:
        size = max(512, (nbytes + 511) // 512 * 512)
        small = size <= 2**20
        segment, place = self._smallest(size, small) or self._new(size, small)
        rest = segment[place][0] - size
        segment[place] = [segment[place][0], owner]
        if rest >= 512 and (small or self.expandable or rest > 2**20):
            segment[place] = [size, owner]
            segment.insert(place + 1, [rest, None])

    def free(self, owner: int) -> None:
        for _, segment in self.segments:
            for piece in segment:
                if piece[1] == owner:
                    piece[1] = None
            merged: list[list] = []
            for piece in segment:
                if merged and merged[-1][1] is None and piece[1] is None:
                    merged[-1][0] += piece[0]
                else:
                    merged.append(piece)
            segment[:] = merged

    def _smallest(self, size: int, small: bool) -> tuple[list[list], int] | None:
        fitting = []
        for number, (pool, segment) in enumerate(self.segments):
            for place, (nbytes, owner) in enumerate(segment):
                can_grow = self.expandable and place == len(segment) - 1
                if pool is small and owner is None and nbytes >= size:
                    fitting.append((can_grow, nbytes, number, place, segment))
        best = min(fitting, key=lambda f: f[:4], default=None)
        return None if best is None else (best[4], best[3])

    def _new(self, size: int, small: bool) -> tuple[list[list], int]:
        if not self.expandable:
            large = 20 * 2**20 if size < 10 * 2**20 else (size + 2**21 - 1) // 2**21 * 2**21
            self.segments.append((small, [[2 * 2**20 if small else large, None]]))
            return self.segments[-1][1], 0
        mine = [segment for pool, segment in self.segments if pool is small]
        if not mine:
            mine = [[]]
            self.segments.append((small, mine[0]))
        segment, page = mine[0], (2 if small else 20) * 2**20
        if not segment or segment[-1][1] is not None:
            segment.append([0, None])
        segment[-1][0] += (size - segment[-1][0] + page - 1) // page * page
        return segment, len(segment) - 1

    @property
    def reserved_bytes(self) -> int:
        return sum(nbytes for _, segment in self.segments for nbytes, _ in segment)

    @property
    def allocated_bytes(self) -> int:
        return sum(nbytes for _, segment in self.segments for nbytes, owner in segment if owner is not None)
