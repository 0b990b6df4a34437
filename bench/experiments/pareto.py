"""`python -m bench pareto`: the whole trade-off of a graph, overhead against peak. Needs no torch on saved graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import strategies
from bench.machine.row_files import slug
from bench.show.terminal import console, print_table, stage
from bench.show.trade_off_figure import draw_trade_off
from planner.analysis import floor
from planner.errors import FileFormatError
from planner.ir import Graph
from planner.simulator import unplanned
from planner.solve import Problem, Status, Strategy, solve
from planner.units import human_bytes
from strategies.frontier import budget_for, pareto
from strategies.ilp.search import Ilp


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffRow:
    """One strategy within one budget. Without a plan that fits, `peak_bytes` and `overhead` are None.

    `bound` is the proven least overhead of any plan that recomputes once there, where the strategy proves one;
    `impossible` says that it has proven that there is no such plan.
    """

    graph: str
    strategy: str
    budget: str
    budget_bytes: int
    peak_bytes: int | None
    overhead: float | None
    bound: float | None
    impossible: bool
    found_by: str
    solve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The rows of one graph, by strategy from the largest budget to the smallest, and what they are measured by."""

    graph: str
    times: str
    start_bytes: int
    peak_bytes: int  # unplanned
    floor_bytes: int  # no plan at all runs in less
    rows: tuple[TradeOffRow, ...]

    def of(self, strategy: str) -> list[TradeOffRow]:
        return [row for row in self.rows if row.strategy == strategy]

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(row.strategy for row in self.rows))

    def share(self, nbytes: int) -> float:
        """Bytes of total peak as a share of what the unplanned step adds to its start."""
        added = self.peak_bytes - self.start_bytes
        return (nbytes - self.start_bytes) / added if added else 1.0


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
    points = pareto(graph, [size for _, size in budgets], options=strategy, time_limit_s=time_limit_s)
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


# -- telling ------------------------------------------------------------------------------------------------------


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


def caption(found: TradeOff) -> str:
    """What a table of the curve has to say beside its figures."""
    seconds = ", ".join(f"{name} {sum(row.solve_s for row in found.of(name)):.1f}" for name in found.strategies)
    return (
        f"Times {found.times}. Unplanned peak {human_bytes(found.peak_bytes)}, {human_bytes(found.start_bytes)} of it "
        f"before the step; no plan at all runs in less than {human_bytes(found.floor_bytes)}. "
        f"Seconds of planning: {seconds}."
    )


def overhead_table(found: TradeOff) -> tuple[list[str], list[list[str]]]:
    """A line per budget: the overhead of every strategy, and the proven bound with the gap of what proves it."""
    proving = [name for name in found.strategies if any(row.bound is not None for row in found.of(name))]
    columns = ["budget", "peak at most", *found.strategies]
    columns += [text for name in proving for text in (f"least by {name}", "gap", "found by")]
    lines = []
    for at in zip(*(found.of(name) for name in found.strategies), strict=True):
        line = [at[0].budget, human_bytes(at[0].budget_bytes), *(_overhead(row) for row in at)]
        for row in (row for row in at if row.strategy in proving):
            line += _proof(row)
        lines.append(line)
    return columns, lines


def _overhead(row: TradeOffRow) -> str:
    return "-" if row.overhead is None else f"{row.overhead:.2%}"


def _proof(row: TradeOffRow) -> tuple[str, str, str]:
    if row.impossible or row.bound is None:
        return "no plan" if row.impossible else "-", "-", "-"
    gap = "-" if row.overhead is None else f"{1 - row.bound / row.overhead if row.overhead else 0.0:.1%}"
    return f"{row.bound:.2%}", gap, row.found_by or "-"


def as_data(found: TradeOff) -> list[dict[str, Any]]:
    """The rows as plain data, each with what its graph starts and peaks at: enough to draw them again."""
    known = asdict(found)
    shared = {name: known[name] for name in ("times", "start_bytes", "floor_bytes")}
    return [{**row, **shared, "unplanned_peak_bytes": found.peak_bytes} for row in known["rows"]]


def from_data(rows: Sequence[dict[str, Any]]) -> TradeOff:
    """The curve that `as_data` gave; FileFormatError for rows that are none, or of several graphs."""
    names = [field.name for field in fields(TradeOffRow)]
    graphs = sorted({row["graph"] for row in rows})
    if len(graphs) != 1 or any(name not in row for row in rows for name in names):
        raise FileFormatError(
            f"rows of {', '.join(graphs) or 'no graph'} are not one curve: save each graph to a file of its own, by "
            "`python -m bench pareto --json FILE` without --budget-for"
        )
    first = rows[0]
    return TradeOff(
        graph=first["graph"],
        times=first["times"],
        start_bytes=first["start_bytes"],
        peak_bytes=first["unplanned_peak_bytes"],
        floor_bytes=first["floor_bytes"],
        rows=tuple(TradeOffRow(**{name: row[name] for name in names}) for row in rows),
    )


# -- the memory for a time ----------------------------------------------------------------------------------------


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
