"""Strategies compared on graphs alone: saved, captured and made-up ones. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import strategies
from planner.comparison import Row, compare
from planner.ir import Graph


def compare_graph(
    graph: Graph, specs: Sequence[str], budgets: Sequence[str], *, time_limit_s: float, in_place: bool = True
) -> list[Row]:
    """Every strategy spec at every budget on one graph."""
    chosen = [(spec, strategies.make(spec)) for spec in specs]
    return compare(graph, chosen, budgets, time_limit_s=time_limit_s, in_place=in_place)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as plain data, for machines."""
    return [_row_data(row) for row in rows]


def _row_data(row: Row) -> dict[str, Any]:
    solution, timeline = row.solution, row.solution.timeline
    base = solution.problem.unplanned
    return {
        "graph": row.graph,
        "strategy": row.strategy,
        "budget": row.budget,
        "budget_bytes": solution.problem.budget_bytes,
        "status": solution.status.value,
        "unplanned_peak_bytes": base.peak_bytes,
        "start_bytes": base.start_bytes,
        "peak_bytes": timeline.peak_bytes if timeline else None,
        "recompute_us": timeline.recompute_us if timeline else None,
        "overhead": timeline.overhead if timeline else None,
        "dropped": len(solution.dropped),
        "gap": solution.gap,
        "found_by": solution.plan.found_by if solution.plan else "",
        "cut_off": solution.plan.cut_off if solution.plan else False,
        "solve_s": solution.solve_s,
        "solve_cpu_s": solution.solve_cpu_s,
        "times": str(solution.problem.graph.timing),
        "reason": solution.reason,
        "note": solution.plan.note if solution.plan else "",
    }
