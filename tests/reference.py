"""Oracles, written apart from what they check: slow, simple, and without any of the planner's own machinery."""

from __future__ import annotations

from itertools import chain, combinations

from planner.analysis import candidates
from planner.ir import Graph, Rerun
from planner.plan import Plan, recompute_once
from planner.schedule import Free, Run, RunKind, Schedule, lower


def naive_bytes(graph: Graph, schedule: Schedule) -> list[int]:
    """Live bytes at every step, adding up a set of storages afresh each time."""
    live = {v.storage for v in graph.values if v.producer is None}
    totals = []
    for step in schedule.steps:
        extra = 0
        if isinstance(step, Free):
            live.remove(step.storage)
        else:
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

    def run(self, schedule: Schedule) -> Execution:
        for step in schedule.steps:
            if isinstance(step, Free):
                self._forget(step.storage)
            else:
                self._run(step)
        return self

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
