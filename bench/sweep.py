"""`python -m bench --batches 4,8,16`: peak memory and latency against the batch size, with and without a plan.

Batches that do not fit on this machine are captured, planned and predicted from the largest one measured, and
marked so. Rows are saved after every batch, and a sweep that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import strategies
from bench import figures
from bench.report import console, print_table
from bench.results import load_rows, save_rows
from bench.run import run_comparison
from bench.workloads import WorkloadSpec
from planner.ir import Graph, Timing, TimingKind
from planner.plan import Plan, lower
from planner.simulator import Timeline, simulate
from planner.solve import Problem, Solution, solve
from planner.units import human_bytes, parse_budget

# A process needs more than its tensors: keep this share of the machine's memory out of reach.
HEADROOM = 0.15


def run_sweep(
    spec: WorkloadSpec,
    batches: Sequence[int],
    strategy_spec: str,
    budget: str,
    *,
    pairs: int,
    time_limit_s: float,
    out: Path,
) -> list[dict[str, Any]]:
    """One row per batch size, a table and two figures."""
    file = out / f"sweep_{spec.slug}_{_slug(strategy_spec)}_{_slug(budget)}.json"
    rows = load_rows(file) if file.exists() else []
    done = {row["batch"] for row in rows}
    if done:
        console.print(f"going on with {file}: batches {sorted(done)} are there")
    measured: Graph | None = None
    for batch in sorted(batches):
        if batch in done:
            continue
        sized = replace(spec, batch=batch)
        graph = _captured(sized)
        if _fits_machine(graph):
            row, measured = _measured_row(sized, strategy_spec, budget, pairs, time_limit_s)
        else:
            row = _predicted_row(sized, graph, measured, strategy_spec, budget, time_limit_s)
        rows.append(row)
        save_rows(file, command=f"python -m bench --batches {','.join(map(str, batches))}", rows=rows)
    rows.sort(key=lambda row: row["batch"])
    _print(spec, rows, strategy_spec, budget)
    for name, draw in (("peak", figures.draw_batch_peaks), ("latency", figures.draw_batch_latency)):
        path = out / f"{file.stem.replace('sweep', name)}.png"
        draw(path, rows, title=f"{spec.source or spec.model}: {name} against batch size, {strategy_spec} at {budget}")
        console.print(f"figure: {path}")
    return rows


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text.replace("%", "pct"))


def _captured(spec: WorkloadSpec) -> Graph:
    return spec.capture(spec.make()).graph


def _fits_machine(graph: Graph) -> bool:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return simulate(graph, lower(graph, Plan())).peak_bytes < (1 - HEADROOM) * memory


def _measured_row(
    spec: WorkloadSpec, strategy_spec: str, budget: str, pairs: int, time_limit_s: float
) -> tuple[dict[str, Any], Graph]:
    found = run_comparison(spec, [strategy_spec], [budget], pairs=pairs, time_limit_s=time_limit_s)
    row, solution = found.rows[0], found.solutions[0]
    data = {
        **_common(spec, solution),
        "measured": True,
        "exact": row.exact,
        "eager_s": row.eager_s,
        "planned_s": None if row.measured_ratio is None else row.measured_ratio * (row.eager_s or 0.0),
        "eager_peak_bytes": row.eager_peak_bytes,
        "planned_peak_bytes": row.measured_peak_bytes or row.predicted_peak_bytes,
    }
    return data, found.measured.graph


def _predicted_row(
    spec: WorkloadSpec, graph: Graph, measured: Graph | None, strategy_spec: str, budget: str, time_limit_s: float
) -> dict[str, Any]:
    """Plan a batch that does not fit: op times and workspaces of the largest measured one, scaled by the batch."""
    if measured is not None:
        graph = scaled(graph, measured)
    unplanned = simulate(graph, lower(graph, Plan()))
    limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=unplanned.peak_bytes)
    problem = Problem(graph=graph, budget_bytes=limit, time_limit_s=time_limit_s)
    solution = solve(problem, strategies.make(strategy_spec), label=strategy_spec)
    planned = solution.timeline or unplanned
    return {
        **_common(spec, solution),
        "measured": False,
        "exact": None,
        "eager_s": unplanned.time_us / 1e6 if measured is not None else None,
        "planned_s": planned.time_us / 1e6 if measured is not None else None,
        "eager_peak_bytes": unplanned.peak_bytes,
        "planned_peak_bytes": planned.peak_bytes,
    }


def scaled(graph: Graph, measured: Graph) -> Graph:
    """`graph` with the times and workspaces of the same ops at another batch size, in proportion to their bytes."""
    known = {op.name: op for op in measured.ops}
    ops = []
    for op in graph.ops:
        source = known.get(op.name)
        if source is None:
            ops.append(op)
            continue
        before = sum(measured.storages[s].nbytes for s in measured.makes[source.id])
        factor = sum(graph.storages[s].nbytes for s in graph.makes[op.id]) / before if before else 1.0
        ops.append(replace(op, time_us=source.time_us * factor, workspace_bytes=round(source.workspace_bytes * factor)))
    timing = Timing(kind=TimingKind.ESTIMATED, device=f"this machine, scaled from {measured.name}")
    return replace(graph, ops=tuple(ops), timing=timing).validate()


def _common(spec: WorkloadSpec, solution: Solution) -> dict[str, Any]:
    base, planned = solution.problem.unplanned, solution.timeline
    return {
        "model": spec.title,
        "batch": spec.batch_size,
        "free_gradients": spec.free_gradients,
        "early_updates": spec.early_updates,
        "strategy": solution.strategy,
        "status": solution.status.value,
        "start_bytes": base.start_bytes,
        "by_role_eager": _roles(base),
        "by_role_planned": _roles(planned) if planned else {},
        "predicted_overhead": solution.overhead,
    }


def _roles(timeline: Timeline) -> dict[str, int]:
    return {role.value: nbytes for role, nbytes in timeline.peak_by_role}


COLUMNS = ("batch", "peak eager", "planned", "less by", "step eager", "planned", "time ratio", "exact", "how")


def _print(spec: WorkloadSpec, rows: Sequence[dict[str, Any]], strategy_spec: str, budget: str) -> None:
    title = f"{spec.source or spec.model}: against batch size, {strategy_spec} at {budget}"
    print_table(title, COLUMNS, [sweep_cells(row) for row in rows])


def sweep_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    eager, planned = row["eager_peak_bytes"], row["planned_peak_bytes"]
    eager_s, planned_s = row["eager_s"], row["planned_s"]
    return (
        str(row["batch"]),
        human_bytes(eager),
        human_bytes(planned),
        f"{1 - planned / eager:.0%}",
        "-" if eager_s is None else f"{eager_s:.2f} s",
        "-" if planned_s is None else f"{planned_s:.2f} s",
        "-" if eager_s is None or planned_s is None else f"{planned_s / eager_s:.2f}x",
        "-" if row["exact"] is None else ("yes" if row["exact"] else "NO"),
        "measured" if row["measured"] else "predicted: does not fit on this machine",
    )
