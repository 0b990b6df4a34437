"""`python -m bench pareto`: the whole trade-off of a graph, overhead against peak. Needs no torch on saved graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import strategies
from bench.experiments.pareto.figure import draw_trade_off
from bench.experiments.pareto.rows import TradeOff, TradeOffRow, caption, overhead_table
from bench.show.file_names import slug
from bench.show.tables import print_table
from bench.show.terminal import console, stage
from planner.analysis import floor
from planner.ir import Graph
from planner.simulator import unplanned
from planner.solve import Problem, Status, Strategy, solve
from planner.units import human_bytes
from strategies.frontier import budget_for, trade_off_curve
from strategies.ilp.search import Ilp


def run_pareto(
    graph: Graph, specs: Sequence[str], budgets: Sequence[str], *, time_limit_s: float, out: Path
) -> TradeOff:
    """Print the curve and draw it to a file in `out`."""
    found = trade_off(graph, specs, budgets, time_limit_s=time_limit_s)
    columns, rows = overhead_table(found)
    print_table(f"{graph.name}: overhead against memory", columns, rows, caption=caption(found))
    path = out / f"pareto_{slug(graph.name)}.png"
    draw_trade_off(path, found)
    console.print(f"figure: {path}")
    return found


def trade_off(graph: Graph, specs: Sequence[str], budgets: Sequence[str], *, time_limit_s: float) -> TradeOff:
    """Every strategy at every budget; `time_limit_s` is for each of them."""
    base = unplanned(graph)
    sizes = {b: Problem.of(graph, b).budget_bytes for b in budgets}
    falling = sorted(sizes.items(), key=lambda item: -item[1])
    rows: list[TradeOffRow] = []
    for spec in specs:
        with stage(f"{graph.name}: the curve of {spec}"):
            strategy = strategies.make(spec)
            if isinstance(strategy, Ilp):
                rows += _proven_curve(graph, spec, strategy, falling, time_limit_s)
            else:
                rows += _curve(graph, spec, strategy, falling, time_limit_s)
    return TradeOff(
        graph=graph.name,
        times=str(graph.timing),
        start_bytes=graph.start_bytes,
        peak_bytes=base.peak_bytes,
        floor_bytes=floor(graph).nbytes,
        rows=tuple(rows),
    )


def _proven_curve(
    graph: Graph, spec: str, strategy: Ilp, budgets: Sequence[tuple[str, int]], time_limit_s: float
) -> list[TradeOffRow]:
    """`ilp` solves budget after budget with what it learned before."""
    points = trade_off_curve(graph, [size for _, size in budgets], options=strategy, time_limit_s=time_limit_s)
    at = {point.budget_bytes: point for point in points}
    return [
        TradeOffRow(
            graph=graph.name,
            strategy=spec,
            budget=budget,
            budget_bytes=size,
            peak_bytes=at[size].peak_bytes,
            overhead=at[size].overhead,
            bound=at[size].bound,
            impossible=at[size].impossible,
            found_by=at[size].who,
            solve_s=at[size].solve_s,
        )
        for budget, size in budgets
    ]


def _curve(
    graph: Graph, spec: str, strategy: Strategy, budgets: Sequence[tuple[str, int]], time_limit_s: float
) -> list[TradeOffRow]:
    """A plan that stays under the next budget too is not looked for again."""
    rows: list[TradeOffRow] = []
    for budget, size in budgets:
        last = rows[-1] if rows else None
        if last is not None and last.peak_bytes is not None and last.peak_bytes <= size:
            known = asdict(last) | {"budget": budget, "budget_bytes": size, "solve_s": 0.0}
            rows.append(TradeOffRow(**known))
            continue
        problem = Problem(graph=graph, budget_bytes=size, time_limit_s=time_limit_s)
        solution = solve(problem, strategy, label=spec)
        timeline = solution.timeline if solution.status is Status.FITS else None
        rows.append(
            TradeOffRow(
                graph=graph.name,
                strategy=spec,
                budget=budget,
                budget_bytes=size,
                peak_bytes=timeline.peak_bytes if timeline else None,
                overhead=timeline.overhead if timeline else None,
                bound=None,
                impossible=False,
                found_by=solution.plan.found_by if solution.plan else "",
                solve_s=solution.solve_s,
            )
        )
    return rows


def run_budget_for(graph: Graph, overhead: float, *, time_limit_s: float) -> dict[str, Any]:
    """Print the least memory in which the step is at most `overhead` slower; returns it as plain data."""
    with stage(f"{graph.name}: the least memory at most {overhead:.1%} slower"):
        found = budget_for(graph, overhead=overhead, time_limit_s=time_limit_s)
    base = unplanned(graph)
    added = base.above_start_bytes
    share = (found.peak_bytes - base.start_bytes) / added if added else 1.0
    console.print(
        f"{graph.name}: at most {overhead:.1%} slower, the step runs in {human_bytes(found.peak_bytes)}, "
        f"{share:.1%} of what it adds to memory unplanned; {found.overhead:.2%} slower (times {graph.timing}). "
        f"Proven: no plan that recomputes once does so in less than {human_bytes(found.floor_bytes)}.\n"
        f"To use it: --budget {found.peak_bytes}",
        soft_wrap=True,
        highlight=False,
    )
    return {
        "graph": graph.name,
        "times": str(graph.timing),
        "at_most": overhead,
        "overhead": found.overhead,
        "peak_bytes": found.peak_bytes,
        "floor_bytes": found.floor_bytes,
        "start_bytes": base.start_bytes,
        "unplanned_peak_bytes": base.peak_bytes,
    }
