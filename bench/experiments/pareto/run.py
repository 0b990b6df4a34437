"""`python -m bench pareto`: the whole trade-off of a graph, overhead against peak. Needs no torch on saved graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import strategies
from bench.experiments.experiment import Experiment, Results
from bench.experiments.host_links import label, moving, without_link
from bench.experiments.pareto.figure import draw_trade_off
from bench.experiments.pareto.rows import TradeOff, TradeOffRow, caption, overhead_table
from bench.show.file_names import slug
from bench.show.terminal import console, stage
from planner.analysis import floor
from planner.host_link import HostLink
from planner.ir import Graph
from planner.simulator import unplanned
from planner.solve import Problem, Solution, Status, Strategy, solve
from strategies.frontier import trade_off_curve
from strategies.ilp.search import Ilp


def _draw(results: Results[TradeOffRow]) -> list[Path]:
    path = results.path.with_suffix(".png")
    draw_trade_off(path, TradeOff.of_one_graph(results.rows))
    return [path]


def _below(results: Results[TradeOffRow]) -> str:
    curve = TradeOff.of_one_graph(results.rows)
    return f"\n{caption(curve)}\n\n![{curve.graph}: extra time against peak memory]({results.path.stem}.png)\n"


PARETO = Experiment(
    kind="pareto",
    rows=(TradeOffRow,),
    table=lambda rows: overhead_table(TradeOff.of_one_graph(rows)),
    below=_below,
    draw=_draw,
)


def run_pareto(
    graph: Graph,
    specs: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    out: Path,
    links: Sequence[HostLink] = (),
) -> TradeOff:
    """Print the curve and draw it to a file in `out`."""
    found = trade_off(graph, specs, budgets, time_limit_s=time_limit_s, links=links)
    PARETO.print(f"{graph.name}: overhead against memory", found.rows, caption=caption(found))
    path = out / f"pareto_{slug(graph.name)}.png"
    draw_trade_off(path, found)
    console.print(f"figure: {path}")
    return found


def trade_off(
    graph: Graph,
    specs: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    links: Sequence[HostLink] = (),
) -> TradeOff:
    """Every strategy at every budget, and over each of `links`; `time_limit_s` is for each of them."""
    sizes = {b: Problem.of(graph, b).budget_bytes for b in budgets}
    falling = sorted(sizes.items(), key=lambda item: -item[1])
    make_row = partial(
        TradeOffRow,
        graph=graph.name,
        times=str(graph.timing),
        start_bytes=graph.start_bytes,
        floor_bytes=floor(graph, moving=bool(links)).nbytes,
        unplanned_peak_bytes=unplanned(graph).peak_bytes,
    )
    rows: list[TradeOffRow] = []
    for spec in without_link(specs, links):
        with stage(f"{graph.name}: the curve of {spec}"):
            strategy = strategies.make(spec)
            make_rows = partial(make_row, strategy=spec)
            if isinstance(strategy, Ilp):
                rows += _proven_curve(graph, strategy, falling, make_rows, time_limit_s)
            else:
                rows += _curve(graph, strategy, falling, make_rows, time_limit_s)
    for link in links:
        for spec in moving(specs):
            with stage(f"{graph.name}: the curve of {label(spec, link)}"):
                make_rows = partial(make_row, strategy=label(spec, link), host_link=str(link))
                rows += _curve(graph, strategies.make(spec), falling, make_rows, time_limit_s, link=link)
    return TradeOff(rows=tuple(rows))


Budgets = Sequence[tuple[str, int]]  # as people write them, and in bytes
MakeRow = Callable[..., TradeOffRow]  # what is the same for a whole curve is in it


def _proven_curve(
    graph: Graph, strategy: Ilp, budgets: Budgets, make_row: MakeRow, time_limit_s: float
) -> list[TradeOffRow]:
    """`ilp` solves budget after budget with what it learned before."""
    points = trade_off_curve(graph, [size for _, size in budgets], options=strategy, time_limit_s=time_limit_s)
    at = {point.budget_bytes: point for point in points}
    return [
        make_row(
            budget=budget,
            budget_bytes=size,
            peak_bytes=at[size].peak_bytes,
            overhead=at[size].overhead,
            bound=at[size].bound,
            impossible=at[size].impossible,
            found_by=at[size].who,
            solve_s=at[size].solve_s,
            cut_off=at[size].cut_off,
        )
        for budget, size in budgets
    ]


def _curve(
    graph: Graph,
    strategy: Strategy,
    budgets: Budgets,
    make_row: MakeRow,
    time_limit_s: float,
    *,
    link: HostLink | None = None,
) -> list[TradeOffRow]:
    """A plan that stays under the next budget too is not looked for again."""
    rows: list[TradeOffRow] = []
    for budget, size in budgets:
        last = rows[-1] if rows else None
        if last is not None and last.peak_bytes is not None and last.peak_bytes <= size:
            rows.append(replace(last, budget=budget, budget_bytes=size, solve_s=0.0, solve_cpu_s=0.0))
            continue
        problem = Problem(graph=graph, budget_bytes=size, time_limit_s=time_limit_s, host_link=link)
        solution = solve(problem, strategy)
        timeline = solution.timeline if solution.status is Status.FITS else None
        rows.append(
            make_row(
                budget=budget,
                budget_bytes=size,
                peak_bytes=timeline.peak_bytes if timeline else None,
                overhead=timeline.overhead if timeline else None,
                bound=_bound(solution),
                impossible=False,
                found_by=solution.plan.found_by if solution.plan else "",
                solve_s=solution.solve_s,
                solve_cpu_s=solution.solve_cpu_s,
                cut_off=solution.plan.cut_off if solution.plan else None,
            )
        )
    return rows


def _bound(solution: Solution) -> float | None:
    """The proven least overhead, of a strategy that proves one where it may move to the host."""
    plan, graph = solution.plan, solution.problem.graph
    if plan is None or plan.lower_bound_us is None or solution.problem.host_link is None:
        return None
    return plan.lower_bound_us / graph.time_us if graph.time_us else 0.0
