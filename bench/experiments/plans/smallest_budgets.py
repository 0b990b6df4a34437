"""The smallest budget that each strategy meets on a graph, by bisection, and what is proven to be out of reach."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import strategies
from bench.experiments.experiment import Experiment, line_by_line
from bench.show.tables import print_table
from planner.analysis import floor
from planner.ir import Graph
from planner.solve import Problem, Status, Strategy, solve
from planner.units import human_bytes
from strategies.ilp.shared_work import Work
from strategies.ilp.smallest import smallest_peak
from strategies.ilp.solvers import SolverName

SEARCHED = ("sqrtn", "mutwo", "ilp")
TOLERANCE = 0.005  # of what the unplanned step adds to its start
MOST_SECONDS = 6.0  # a solve: there are several of them a graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestRow:
    """The smallest budget that a strategy meets, up to TOLERANCE of the step.

    Nothing that recomputes each op once runs in less than `once_floor_bytes`, nothing at all in less than
    `floor_bytes`.
    """

    graph: str
    strategy: str
    smallest_bytes: int
    start_bytes: int
    unplanned_peak_bytes: int
    once_floor_bytes: int
    floor_bytes: int
    overhead: float
    solves: int
    search_s: float


def smallest_budgets(graph: Graph, specs: Sequence[str], *, time_limit_s: float) -> list[SmallestRow]:
    """A row for each of SEARCHED that is among `specs`."""
    limit_s = min(MOST_SECONDS, time_limit_s)
    problem = Problem(graph=graph, budget_bytes=floor(graph).nbytes, time_limit_s=limit_s)
    deadline = time.perf_counter() + limit_s
    once = smallest_peak(Work(problem), SolverName.ORTOOLS, deadline=deadline).floor_bytes
    chosen = [spec for spec in specs if spec in SEARCHED]
    return [
        _search(problem, spec, strategies.make(spec), once_floor_bytes=max(once, problem.budget_bytes))
        for spec in chosen
    ]


def _search(problem: Problem, label: str, strategy: Strategy, *, once_floor_bytes: int) -> SmallestRow:
    """Bisect between what nothing meets and what was met, starting from the smallest peak the strategy knows of.

    All of SEARCHED recompute once, so nothing below the floor of such plans need be tried.
    """
    graph, base = problem.graph, problem.unplanned
    missed, met, overhead, solves = once_floor_bytes, base.peak_bytes, 0.0, 0
    budget, started = once_floor_bytes, time.perf_counter()
    while met - missed > TOLERANCE * base.above_start_bytes or solves == 0:
        solution = solve(Problem(graph=graph, budget_bytes=budget, time_limit_s=problem.time_limit_s), strategy)
        solves += 1
        peak = solution.timeline.peak_bytes if solution.timeline is not None else met
        if solution.status is Status.FITS:
            met, overhead = peak, solution.overhead or 0.0
        else:
            missed = max(missed, budget)
        budget = peak if missed < peak < met else (missed + met) // 2
    return SmallestRow(
        graph=graph.name,
        strategy=label,
        smallest_bytes=met,
        start_bytes=base.start_bytes,
        unplanned_peak_bytes=base.peak_bytes,
        once_floor_bytes=once_floor_bytes,
        floor_bytes=problem.budget_bytes,
        overhead=overhead,
        solves=solves,
        search_s=time.perf_counter() - started,
    )


COLUMNS = ("graph", "strategy", "smallest budget met", "of step", "overhead there", "recompute once: proven floor",
           "of step", "any plan: proven floor", "of step", "seconds")  # fmt: skip


def smallest_cells(row: SmallestRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    added = max(1, row.unplanned_peak_bytes - row.start_bytes)

    def pair(nbytes: int) -> tuple[str, str]:
        return human_bytes(nbytes), f"{(nbytes - row.start_bytes) / added:.1%}"

    return (
        row.graph,
        row.strategy,
        *pair(row.smallest_bytes),
        f"{row.overhead:.1%}",
        *pair(row.once_floor_bytes),
        *pair(row.floor_bytes),
        f"{row.search_s:.1f}",
    )


def print_smallest(rows: Sequence[SmallestRow]) -> None:
    if rows:
        cells = [smallest_cells(row)[1:] for row in rows]
        print_table(f"{rows[0].graph}: the smallest budget met", COLUMNS[1:], cells)


SMALLEST_BUDGETS = Experiment(kind="smallest_budgets", rows=(SmallestRow,), table=line_by_line(COLUMNS, smallest_cells))
