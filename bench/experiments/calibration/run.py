"""`python -m bench calibrate`: how good estimated times are, and the plans made from them, on the CPU at hand.

The CPU is described by a short benchmark (`profiler.estimating.calibration`), each model's step is estimated from
that and then measured op by op. A plan made on the estimated graph is lowered and simulated once more on the measured
one, beside the plan that the same strategy makes there, both for the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.experiments.calibration.agreement import Point, by_group, by_kind, rank_correlations, sums_of
from bench.experiments.calibration.figure import draw_points
from bench.experiments.calibration.rows import (
    COLUMNS,
    READING,
    CalibrationRow,
    JudgedPlan,
    PlanPair,
    calibration_cells,
    more_tables,
    summary,
)
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.prepared import prepared
from bench.experiments.results_file import save_rows
from bench.show.tables import markdown, print_table
from bench.show.terminal import console, stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.solve import Problem, Solution, solve
from profiler.estimating.calibration import Sizes, calibrated_cpu
from profiler.estimating.devices import Device
from profiler.estimating.kinds import kind_of
from profiler.estimating.roofline import estimated, is_view
from profiler.tracing.whole_step import TracedStep
from strategies import make

# The form of the estimate was adjusted after a look at the first five; the last three were never looked at.
CASES = (
    WorkloadSpec(model="resnet50", batch=8),
    WorkloadSpec(model="resnet152", batch=4),
    WorkloadSpec(model="bert", batch=8, seq=128),
    WorkloadSpec(model="gpt2", batch=4, seq=256),
    WorkloadSpec(model="mobilenet", batch=16),
    WorkloadSpec(model="vit", batch=8),
    WorkloadSpec(model="densenet121", batch=8),
    WorkloadSpec(model="convnext", batch=8),
)


def run_calibration(
    specs: Sequence[WorkloadSpec],
    strategies: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    out: Path | None,
    sizes: Sizes | None = None,
) -> list[CalibrationRow]:
    """One row a model, saved as they come; beside `out`, a figure of the same name."""
    with stage("calibrating this CPU"):
        device = calibrated_cpu(sizes)
    print_device(device)
    rows: list[CalibrationRow] = []
    for spec in specs:
        with stage(f"measuring and planning {spec.title}"):
            row = calibrate_model(spec, device, strategies, budgets, time_limit_s=time_limit_s)
        rows.append(row)
        CALIBRATION.print(f"{spec.title}: {device.name}, estimated against measured", [row])
        for title, (columns, cells) in more_tables([row]):
            print_table(title, columns, cells)
        console.print(summary(rows))
        if out is not None:
            save_rows(out, CALIBRATION, rows)
            draw_points(out.with_suffix(".png"), rows)
    return rows


def print_device(device: Device) -> None:
    """What the benchmark found."""
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in device.flops_by_dtype.items())
    console.print(
        f"{device.name}: {rates}, {device.bytes_per_s / 1e9:.1f} GB/s, new memory {device.new_bytes_per_s / 1e9:.1f} "
        f"GB/s, in large blocks {device.new_large_bytes_per_s / 1e9:.1f} GB/s, {device.launch_us:.1f} µs an op"
    )
    cells = [
        (
            kind.value,
            f"{share:.2f}",
            f"{device.workspaces[kind].share:.2f}",
        )
        for kind, share in device.share_by_kind.items()
    ]
    print_table("Share of the plain rates by kind", ("kind", "share", "workspace to what it reads or makes"), cells)


def calibrate_model(
    spec: WorkloadSpec, device: Device, strategies: Sequence[str], budgets: Sequence[str], *, time_limit_s: float
) -> CalibrationRow:
    """The row of one model."""
    ready = prepared(spec)
    guess, truth = estimated(ready.traced, device), ready.graph
    found = points(ready.traced, guess, truth)
    plain, weighted = rank_correlations(found)
    return CalibrationRow(
        model=spec.title,
        times=(str(guess.timing), str(truth.timing)),
        **asdict(sums_of(found)),
        rank_correlation=plain,
        weighted_rank_correlation=weighted,
        kinds=by_kind(found),
        plans=tuple(
            plan_pair(guess, truth, strategy, budget, time_limit_s=time_limit_s)
            for budget in budgets
            for strategy in strategies
        ),
        points=by_group(found),
    )


def points(traced: TracedStep, guess: Graph, truth: Graph) -> list[Point]:
    """Estimated and measured time of every op that is not a view."""
    return [
        Point(kind=kind_of(node), estimated_us=a.time_us, measured_us=b.time_us)
        for node, a, b in zip(traced.nodes, guess.ops, truth.ops, strict=True)
        if not is_view(truth, b) and b.time_us > 0
    ]


def plan_pair(guess: Graph, truth: Graph, strategy: str, budget: str, *, time_limit_s: float) -> PlanPair:
    """One strategy's plans on the estimated and on the measured graph for the same bytes, both judged on the latter."""
    problem = Problem.of(truth, budget, time_limit_s=time_limit_s)
    limit, own = problem.budget_bytes, solve(problem, make(strategy))
    other = solve(Problem(graph=guess, budget_bytes=limit, time_limit_s=time_limit_s), make(strategy))
    return PlanPair(
        strategy=strategy,
        budget=budget,
        budget_bytes=limit,
        above_start_bytes=limit - truth.start_bytes,
        from_measured=_judged(problem, own),
        from_estimated=_judged(problem, other),
        estimated_overhead=other.overhead,
        estimated_peak_bytes=other.timeline.peak_bytes if other.timeline else None,
    )


def _judged(problem: Problem, solution: Solution) -> JudgedPlan:
    """What a plan costs on the measured graph, wherever it was made."""
    if solution.plan is None:
        return JudgedPlan(overhead=None, peak_bytes=None, over_bytes=None, solve_s=solution.solve_s)
    timeline = problem.timeline(solution.plan)
    return JudgedPlan(
        overhead=timeline.overhead,
        peak_bytes=timeline.peak_bytes,
        over_bytes=max(0, timeline.peak_bytes - problem.budget_bytes),
        solve_s=solution.solve_s,
    )


def _below(results: Results[CalibrationRow]) -> str:
    sections = [f"\n{summary(results.rows)}\n\n{READING}\n"]
    sections += [f"\n## {title}\n\n{markdown(*table)}\n" for title, table in more_tables(results.rows)]
    return "".join([*sections, f"\n![estimated against measured op times]({results.path.stem}.png)\n"])


CALIBRATION = Experiment(
    kind="calibration",
    rows=(CalibrationRow,),
    table=line_by_line(COLUMNS, calibration_cells),
    below=_below,
    draw=lambda results: draw_points(results.path.with_suffix(".png"), results.rows),
)
