"""Many strategies at many budgets, judged alike, and the table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.host_link import HostLink
from planner.ir import Graph
from planner.solve import DEFAULT_TIME_LIMIT_S, Problem, Solution, Status, Strategy, solve_if_needed
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a comparison."""

    graph: str
    strategy: str
    budget: str
    solution: Solution


def compare(
    graph: Graph,
    strategies: Sequence[tuple[str, Strategy]],
    budgets: Sequence[str | int],
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    in_place: bool = True,
    host_link: HostLink | None = None,
) -> list[Row]:
    """Every labelled strategy at every budget, on one graph, judged alike; at a budget above the peak none is asked."""
    rows = []
    for budget in budgets:
        problem = Problem.of(graph, budget, time_limit_s=time_limit_s, in_place=in_place, host_link=host_link)
        for label, strategy in strategies:
            solution = solve_if_needed(problem, strategy, label=label)
            rows.append(Row(graph=graph.name, strategy=label, budget=str(budget), solution=solution))
    return rows


COLUMNS = ("graph", "budget", "strategy", "status", "peak", "of step", "overhead", "dropped", "gap", "seconds", "note")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS. `of step` is the peak above the start, relative to the unplanned."""
    solution, timeline = row.solution, row.solution.timeline
    head = (row.graph, row.budget, row.strategy, solution.status.value)
    seconds = f"{solution.solve_s:.2f}"
    if timeline is None:
        return (*head, "-", "-", "-", "-", "-", seconds, solution.reason)
    base = solution.problem.unplanned
    share = timeline.above_start_bytes / base.above_start_bytes if base.above_start_bytes else 1.0
    note = solution.reason if solution.status is not Status.FITS else (solution.plan.note if solution.plan else "")
    return (
        *head,
        human_bytes(timeline.peak_bytes),
        f"{share:.0%}",
        f"{timeline.overhead:.1%}",
        str(len(solution.dropped)),
        "-" if solution.gap is None else f"{solution.gap:.1%}",
        seconds,
        note,
    )


def table(rows: Sequence[Row]) -> str:
    """The comparison as plain text, one row a line."""
    lines = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
