"""Bounds for *any* schedule: forward ops rerun as often as one likes, backward and optimizer ops run once.

A linear program over stages of the backward. S_{x,k} is "x is resident at moment k", R_{o,k} "o is rerun in stage k".
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from planner.analysis import droppable, floor, least_bytes, rerun_reads
from planner.ir import Graph, Phase
from strategies.ilp.linear import ONE, ZERO, Linear, SparseModel, sparse, total
from strategies.ilp.solvers import Outcome, SolverName, solve_model

STAGES = (1, 3, 5, 9, 15)


def any_schedule_bound_us(
    graph: Graph,
    budget_bytes: int,
    *,
    solver: SolverName = SolverName.ORTOOLS,
    time_limit_s: float = 5.0,
    in_place: bool = True,
) -> float:
    """A lower bound on the recompute time of any schedule within the budget; infinite if there is none.

    The best over several numbers of stages. SolverError if the solver is missing or fails.
    """
    if floor(graph, in_place=in_place).nbytes > budget_bytes:
        return math.inf
    best = 0.0
    for stages in STAGES:
        model = _Staged(graph, _moments(graph, stages, in_place=in_place), in_place=in_place).at(budget_bytes)
        answer = solve_model(model, solver, time_limit_s=time_limit_s / len(STAGES), gap=0.0)
        if answer.outcome is Outcome.INFEASIBLE:
            return math.inf
        if answer.outcome is Outcome.SOLVED:
            best = max(best, answer.bound)
    return best


def _touched(graph: Graph, op: int) -> dict[int, None]:
    return dict.fromkeys((*graph.reads[op], *graph.makes[op]))


def _moments(graph: Graph, stages: int, *, in_place: bool) -> list[int]:
    """The turn to the backward, and the worst op of each of `stages` equal windows after it."""
    least = least_bytes(graph, in_place=in_place)
    first = next((op.id for op in graph.ops if op.phase is Phase.BACKWARD), len(graph.ops) - 1)
    edges = np.linspace(first, len(graph.ops), stages + 1).astype(int)
    worst = [int(a + least[a:b].argmax()) for a, b in pairwise(edges.tolist()) if b > a]
    return sorted({max(0, first - 1), *worst})


class _Staged:
    """The linear program for one set of moments."""

    def __init__(self, graph: Graph, moments: list[int], *, in_place: bool) -> None:
        self.graph = graph
        self.least = least_bytes(graph, in_place=in_place)
        self.moments = moments
        self.droppable = sorted(droppable(graph))
        self.cost: list[float] = []
        self.rows: list[tuple[dict[int, float], float]] = []
        self.memory: list[Linear] = []
        self._stage = np.searchsorted(np.array(moments), np.arange(len(graph.ops)))
        self._build()

    def at(self, budget_bytes: int) -> SparseModel:
        unit = max(1.0, budget_bytes / 100)
        rows = list(self.rows)
        for memory in self.memory:
            terms = {v: -c / unit for v, c in memory.terms.items()}
            rows.append((terms, (memory.constant - budget_bytes) / unit))
        return sparse(self.cost, 0.0, [False] * len(self.cost), rows)

    def _variable(self, cost: float = 0.0) -> Linear:
        self.cost.append(cost)
        return Linear(0.0, {len(self.cost) - 1: 1.0})

    def _at_least(self, left: Linear, right: Linear) -> None:
        row = total((1.0, left), (-1.0, right))
        if row.terms:
            self.rows.append((row.terms, -row.constant))

    def _build(self) -> None:
        graph = self.graph
        resident = dict.fromkeys(self.droppable, ZERO)  # S at the moment before
        for k in range(len(self.moments) + 1):
            ran = {op: self._ran(op, k) for op in dict.fromkeys(graph.maker[x] or 0 for x in self.droppable)}
            available = {x: total((1.0, resident[x]), (1.0, ran[graph.maker[x] or 0])) for x in self.droppable}
            self._needs(k, ran, available)
            if k < len(self.moments):
                resident = self._residents(k, available)

    def _ran(self, op: int, k: int) -> Linear:
        """R_{o,k}; nothing before the original run, which is free."""
        born = int(self._stage[op])
        if k < born:
            return ZERO
        return ONE if k == born else self._variable(self.graph.ops[op].time_us)

    def _needs(self, k: int, ran: dict[int, Linear], available: dict[int, Linear]) -> None:
        graph = self.graph
        for op in np.flatnonzero(self._stage == k).tolist():
            for x in graph.reads[op]:
                if x in available and available[x].terms:
                    self._at_least(available[x], ONE)
        for op, rerun in ran.items():
            if not rerun.terms:
                continue
            for x in dict.fromkeys(graph.values[v].storage for v in rerun_reads(graph.ops[op])):
                if x in available and x not in graph.makes[op]:
                    self._at_least(available[x], rerun)

    def _residents(self, k: int, available: dict[int, Linear]) -> dict[int, Linear]:
        position, graph = self.moments[k], self.graph
        least = Linear(float(self.least[position]))
        touched = _touched(graph, position)
        resident = {}
        for x in self.droppable:
            made = graph.maker[x] or 0
            if position < made:
                resident[x] = ZERO
            elif x in touched:
                resident[x] = ONE
            else:
                resident[x] = self._variable()
                self._at_least(available[x], resident[x])
                least.add(resident[x], graph.storages[x].nbytes)
        self.memory.append(least)
        return resident
