"""Strategies compared on graphs alone: saved, captured and made-up ones. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import strategies
from bench.experiments.experiment import Experiment, Table
from bench.experiments.host_links import label, moving, without_link
from planner.comparison import Row, compare
from planner.host_link import HostLink
from planner.ir import Graph
from planner.solve import Status

ALONE = "ilp:seeds=false"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One strategy at one budget on one graph. Without a plan, its peak and times are None."""

    graph: str
    strategy: str
    budget: str
    budget_bytes: int
    status: Status
    unplanned_peak_bytes: int
    start_bytes: int
    peak_bytes: int | None
    recompute_us: float | None
    overhead: float | None
    dropped: int
    gap: float | None
    found_by: str
    cut_off: bool
    solve_s: float
    solve_cpu_s: float
    times: str
    reason: str
    note: str
    stall_us: float | None = None
    moved_bytes: int | None = None

    @staticmethod
    def of(row: Row) -> PlanRow:
        """A line of a comparison, without the graph and the schedule behind it."""
        solution, timeline = row.solution, row.solution.timeline
        base = solution.problem.unplanned
        return PlanRow(
            graph=row.graph,
            strategy=row.strategy,
            budget=row.budget,
            budget_bytes=solution.problem.budget_bytes,
            status=solution.status,
            unplanned_peak_bytes=base.peak_bytes,
            start_bytes=base.start_bytes,
            peak_bytes=timeline.peak_bytes if timeline else None,
            recompute_us=timeline.recompute_us if timeline else None,
            overhead=timeline.overhead if timeline else None,
            dropped=len(solution.dropped),
            gap=solution.gap,
            found_by=solution.plan.found_by if solution.plan else "",
            cut_off=solution.plan.cut_off if solution.plan else False,
            solve_s=solution.solve_s,
            solve_cpu_s=solution.solve_cpu_s,
            times=str(solution.problem.graph.timing),
            reason=solution.reason,
            note=solution.plan.note if solution.plan else "",
            stall_us=timeline.stall_us if timeline else None,
            moved_bytes=timeline.moved_bytes if timeline else None,
        )


def compare_graph(
    graph: Graph,
    specs: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    in_place: bool = True,
    links: Sequence[HostLink] = (),
) -> list[Row]:
    """Every strategy spec at every budget on one graph; with `links`, those that use one over each of them as well."""
    chosen = [(spec, strategies.make(spec)) for spec in without_link(specs, links)]
    rows = []
    for budget in budgets:
        rows += compare(graph, chosen, [budget], time_limit_s=time_limit_s, in_place=in_place)
        for link in links:
            linked = [(label(spec, link), strategies.make(spec)) for spec in moving(specs)]
            rows += compare(graph, linked, [budget], time_limit_s=time_limit_s, in_place=in_place, host_link=link)
    return rows


COLUMNS = (
    "graph", "budget", "strategy", "status", "peak of step", "overhead", "gap", "seconds", "CPU seconds", "who won",
    "MILP alone",
)  # fmt: skip


def plans_table(rows: Sequence[PlanRow]) -> Table:
    """`ilp:seeds=false` has no line of its own: it says, beside `ilp`, what the program reached alone."""
    alone = {(row.graph, row.budget): row for row in rows if row.strategy == ALONE}
    shown = [row for row in rows if row.strategy != ALONE]
    return COLUMNS, [_cells(row, alone.get((row.graph, row.budget))) for row in shown]


def _cells(row: PlanRow, alone: PlanRow | None) -> tuple[str, ...]:
    peak, step = row.peak_bytes, row.unplanned_peak_bytes - row.start_bytes
    return (
        row.graph,
        row.budget,
        row.strategy,
        row.status.value,
        "-" if peak is None else f"{(peak - row.start_bytes) / step:.1%}",
        "-" if row.overhead is None else f"{row.overhead:.2%}",
        "-" if row.gap is None else f"{row.gap:.2%}",
        f"{row.solve_s:.2f}",
        f"{row.solve_cpu_s:.2f}",
        row.found_by or "-",
        "-" if row.strategy != "ilp" or alone is None else _reached(alone),
    )


def _reached(row: PlanRow) -> str:
    if row.gap is None:
        return f"{row.status.value}, {row.solve_cpu_s:.1f} CPU s"
    return f"{row.overhead:.2%}, gap {row.gap:.2%}, {row.solve_cpu_s:.1f} CPU s"


PLANS = Experiment(kind="plans", rows=(PlanRow,), table=plans_table)
