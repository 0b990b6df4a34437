"""`python -m bench calibrate`: how good estimated times are, and the plans made from them, on the CPU at hand.

The CPU is described by a short benchmark (`profiler.estimating.calibration`), each model's step is estimated from
that and then measured op by op. A plan made on the estimated graph is lowered and simulated once more on the measured
one, beside the plan that the same strategy makes there, both for the same bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.machine.row_files import command_line, save_rows
from bench.show import estimate_figures as figures_estimates
from bench.show.terminal import console, print_table, stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.solve import Problem, Solution, solve
from planner.units import human_bytes
from profiler.estimating.calibration import Sizes, calibrated_cpu
from profiler.estimating.devices import Device
from profiler.estimating.kinds import OpKind, kind_of
from profiler.estimating.roofline import estimated, is_view
from profiler.measuring.op_times import measure
from profiler.tracing.whole_step import TracedStep, capture
from strategies import make

CASES = (
    WorkloadSpec(model="resnet50", batch=8),
    WorkloadSpec(model="resnet152", batch=4),
    WorkloadSpec(model="bert", batch=8, seq=128),
    WorkloadSpec(model="gpt2", batch=4, seq=256),
    WorkloadSpec(model="mobilenet", batch=16),
)


def run_calibration(
    specs: Sequence[WorkloadSpec],
    strategies: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    out: Path | None,
    sizes: Sizes | None = None,
) -> list[dict[str, Any]]:
    """One row a model, saved as they come; beside `out`, a figure of the same name."""
    with stage("calibrating this CPU"):
        device = calibrated_cpu(sizes)
    print_device(device)
    rows: list[dict[str, Any]] = []
    for spec in specs:
        with stage(f"measuring and planning {spec.title}"):
            row = calibrate_model(spec, device, strategies, budgets, time_limit_s=time_limit_s)
        rows.append(row)
        print_table(f"{spec.title}: {device.name}, estimated against measured", COLUMNS, [calibration_cells(row)])
        for title, columns, cells in more_tables([row]):
            print_table(title, columns, cells)
        console.print(summary(rows))
        if out is not None:
            save_rows(out, command=command_line(), rows=rows)
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


# -- one model ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One op that is not a view."""

    kind: OpKind
    estimated_us: float
    measured_us: float


def calibrate_model(
    spec: WorkloadSpec, device: Device, strategies: Sequence[str], budgets: Sequence[str], *, time_limit_s: float
) -> dict[str, Any]:
    """The row of one model."""
    step, model, optimizer, batch = spec.make()
    traced = capture(step, model, optimizer, batch, name=spec.title)
    guess = estimated(traced, device)
    truth = measure(traced, batch, show_progress=False).graph
    found = points(traced, guess, truth)
    return {
        "model": spec.title,
        "times": [str(guess.timing), str(truth.timing)],
        **agreement(found),
        "kinds": by_kind(found),
        "plans": [
            plan_row(guess, truth, strategy, budget, time_limit_s=time_limit_s)
            for budget in budgets
            for strategy in strategies
        ],
        "points": by_group(found),
    }


def points(traced: TracedStep, guess: Graph, truth: Graph) -> list[Point]:
    """Estimated and measured time of every op that is not a view."""
    return [
        Point(kind=kind_of(node), estimated_us=a.time_us, measured_us=b.time_us)
        for node, a, b in zip(traced.nodes, guess.ops, truth.ops, strict=True)
        if not is_view(truth, b) and b.time_us > 0
    ]


def by_group(found: Sequence[Point]) -> dict[str, dict[str, list[float]]]:
    """Times as the figure shows them, four digits each: column by column, which keeps the file short."""
    columns: dict[str, dict[str, list[float]]] = {}
    for point in found:
        column = columns.setdefault(GROUPS[point.kind], {"estimated_us": [], "measured_us": []})
        column["estimated_us"].append(float(f"{point.estimated_us:.4g}"))
        column["measured_us"].append(float(f"{point.measured_us:.4g}"))
    return columns


def agreement(found: Sequence[Point]) -> dict[str, Any]:
    """How well the estimates of one step follow its measured times."""
    guessed, taken = [p.estimated_us for p in found], [p.measured_us for p in found]
    off_us = sum(abs(p.estimated_us - p.measured_us) for p in found)
    return {
        "ops": len(found),
        "estimated_us": sum(guessed),
        "measured_us": sum(taken),
        "rank_correlation": spearman(guessed, taken),
        "weighted_rank_correlation": spearman(guessed, taken, weights=taken),
        "median_factor": median_factor(found),
        "misplaced_share": off_us / sum(taken),  # Σ|estimated - measured| to Σ measured
    }


def median_factor(found: Sequence[Point]) -> float:
    """How far off the middle op is, as a factor: 2.0 is twice or half as long."""
    return math.exp(statistics.median(abs(math.log(p.estimated_us / p.measured_us)) for p in found))


def by_kind(found: Sequence[Point]) -> list[dict[str, Any]]:
    """Sums and errors of each kind, the dearest first."""
    rows = []
    for kind in OpKind:
        ours = [p for p in found if p.kind is kind]
        if ours:
            sums = {key: value for key, value in agreement(ours).items() if "rank" not in key}
            rows.append({"kind": kind.value, **sums})
    return sorted(rows, key=lambda row: -row["measured_us"])


def spearman(a: Sequence[float], b: Sequence[float], *, weights: Sequence[float] | None = None) -> float:
    """The correlation of ranks, ties at their mean rank; with `weights`, of both ranks under these weights."""
    x, y = ranks(a), ranks(b)
    w = list(weights) if weights is not None else [1.0] * len(x)
    total = sum(w)
    mean_x, mean_y = (sum(wi * r for wi, r in zip(w, z, strict=True)) / total for z in (x, y))
    rows = list(zip(w, x, y, strict=True))
    covariance = sum(wi * (p - mean_x) * (q - mean_y) for wi, p, q in rows)
    spread = math.sqrt(
        sum(wi * (p - mean_x) ** 2 for wi, p, _ in rows) * sum(wi * (q - mean_y) ** 2 for wi, _, q in rows)
    )
    return covariance / spread if spread else math.nan


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 for the smallest; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    for i in range(1, len(order) + 1):
        if i < len(order) and values[order[i]] == values[order[start]]:
            continue
        for place in order[start:i]:
            found[place] = (start + i + 1) / 2
        start = i
    return found


def draw_points(path: Path, rows: Sequence[dict[str, Any]]) -> list[Path]:
    """The figure of every op, one panel a model; none where rows were saved without their points."""
    if not rows or any("points" not in row for row in rows):
        return []
    title = f"Op times {rows[0]['times'][0]}, against those measured on it"
    figures_estimates.draw_estimates(path, [panel(row) for row in rows], title=title)
    return [path]


def panel(row: dict[str, Any]) -> figures_estimates.Estimates:
    """One model's part of the figure."""
    shown = (
        (group, estimated_us, measured_us)
        for group, columns in row["points"].items()
        for estimated_us, measured_us in zip(columns["estimated_us"], columns["measured_us"], strict=True)
    )
    ratio = row["estimated_us"] / row["measured_us"]
    return figures_estimates.Estimates(title=f"{row['model']}: estimated {ratio:.2f}x measured", points=tuple(shown))


# -- plans made from either -------------------------------------------------------------------------------------------


def plan_row(guess: Graph, truth: Graph, strategy: str, budget: str, *, time_limit_s: float) -> dict[str, Any]:
    """One strategy's plans on the estimated and on the measured graph for the same bytes, both judged on the latter."""
    problem = Problem.of(truth, budget, time_limit_s=time_limit_s)
    limit, own = problem.budget_bytes, solve(problem, make(strategy))
    other = solve(Problem(graph=guess, budget_bytes=limit, time_limit_s=time_limit_s), make(strategy))
    return {
        "strategy": strategy,
        "budget": budget,
        "budget_bytes": limit,
        "above_start_bytes": limit - truth.start_bytes,
        "from_measured": _judged(own.problem, own),
        "from_estimated": _judged(own.problem, other),
        "estimated_overhead": other.overhead,
        "estimated_peak_bytes": other.timeline.peak_bytes if other.timeline else None,
    }


def _judged(problem: Problem, solution: Solution) -> dict[str, Any]:
    """What a plan costs on the measured graph, wherever it was made."""
    if solution.plan is None:
        return {"overhead": None, "peak_bytes": None, "over_bytes": None, "solve_s": solution.solve_s}
    timeline = problem.timeline(solution.plan)
    return {
        "overhead": timeline.overhead,
        "peak_bytes": timeline.peak_bytes,
        "over_bytes": max(0, timeline.peak_bytes - problem.budget_bytes),
        "solve_s": solution.solve_s,
    }


# -- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    "model", "ops", "measured ms", "estimated ms", "estimated to measured", "rank correlation", "the same, by time",
    "middle op off by", "time misplaced",
)  # fmt: skip
KIND_COLUMNS = ("model", "kind", "ops", "measured ms", "estimated ms", "estimated to measured", "middle op off by")
PLAN_COLUMNS = (
    "model", "budget", "strategy", "overhead, planned on measured", "overhead, planned on estimated", "expected by it",
    "peak on the measured graph",
)  # fmt: skip


READING = (
    "Estimated: from shapes, and from a benchmark of this CPU with two other, small networks; none of its rates comes "
    "from these models. The form of the estimate does in part: after a first look at these five, new memory in large "
    "blocks and the backward of grouped convolutions got terms of their own, so that other models may fare worse. "
    "Measured: every op of the step, median of three. Rank correlation is Spearman's over all ops that are not views; "
    "*by time* weighs each op with its measured time. *Middle op off by* is the median factor between both. *Time "
    "misplaced* is the sum of all errors, whatever their sign, to the measured time."
)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The whole report in three sentences."""
    totals = [row["estimated_us"] / row["measured_us"] for row in rows]
    ordered = [row["rank_correlation"] for row in rows]
    plans = [plan for row in rows for plan in row["plans"] if plan["from_estimated"]["overhead"] is not None]
    fair = [p for p in plans if p["from_measured"]["over_bytes"] == 0]
    extra = [p["from_estimated"]["overhead"] - p["from_measured"]["overhead"] for p in fair]
    over = [p["from_estimated"]["over_bytes"] / p["above_start_bytes"] for p in fair]
    text = (
        f"Totals are {min(totals):.2f}x to {max(totals):.2f}x the measured ones, rank correlations "
        f"{min(ordered):.2f} to {max(ordered):.2f}."
    )
    if not fair:
        return text + " No plan from measured times fits its budget, so that there is nothing to compare."
    broken = sum(share > 0 for share in over)
    return text + (
        f" Under measured times, a plan made from estimates costs {100 * statistics.mean(extra):+.2f} points of the "
        f"step more than one made from measurements (mean of {len(fair)}; worst {100 * max(extra):+.2f}). On the "
        f"measured graph {broken} of {len(fair)} of them {'is' if broken == 1 else 'are'} over budget"
        + (f", by {max(over):.1%} of what the step may add at most." if broken else ".")
    )


def calibration_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A model as text, in the order of COLUMNS."""
    return (
        row["model"],
        f"{row['ops']:,}",
        *_sums(row),
        f"{row['rank_correlation']:.3f}",
        f"{row['weighted_rank_correlation']:.3f}",
        f"{row['median_factor']:.2f}x",
        f"{row['misplaced_share']:.0%}",
    )


def _sums(row: dict[str, Any]) -> tuple[str, str, str]:
    measured, guessed = row["measured_us"], row["estimated_us"]
    return f"{measured / 1e3:,.1f}", f"{guessed / 1e3:,.1f}", f"{guessed / measured:.2f}x"


def more_tables(rows: Sequence[dict[str, Any]]) -> list[tuple[str, Sequence[str], list[Sequence[str]]]]:
    """(title, columns, cells) of what lies inside the rows: plans, and errors by kind."""
    plans = [plan_cells(row["model"], plan) for row in rows for plan in row["plans"]]
    kinds = [
        (row["model"], kind["kind"], f"{kind['ops']:,}", *_sums(kind), f"{kind['median_factor']:.2f}x")
        for row in rows
        for kind in row["kinds"]
    ]
    return [
        ("Plans made from estimates, judged on measured times", PLAN_COLUMNS, [*plans]),
        ("Estimated against measured by kind of op", KIND_COLUMNS, [*kinds]),
    ]


def plan_cells(model: str, plan: dict[str, Any]) -> tuple[str, ...]:
    """A plan as text, in the order of PLAN_COLUMNS."""
    other = plan["from_estimated"]
    over = other["over_bytes"]
    fits = "-" if over is None else "within budget" if not over else f"over by {human_bytes(over)}"
    if over:
        fits += f" ({over / plan['above_start_bytes']:.1%} of what the step may add)"
    return (
        model,
        plan["budget"],
        plan["strategy"],
        _overhead(plan["from_measured"]),
        _overhead(other),
        "-" if plan["estimated_overhead"] is None else f"{plan['estimated_overhead']:.2%}",
        fits,
    )


def _overhead(judged: dict[str, Any]) -> str:
    if judged["overhead"] is None:
        return "no plan"
    return f"{judged['overhead']:.2%}" + (" (over)" if judged["over_bytes"] else "")


# Kinds that share a colour in the figure.
GROUPS = {
    OpKind.MATMUL: "matrix products, attention",
    OpKind.ATTENTION: "matrix products, attention",
    OpKind.ATTENTION_BACKWARD: "matrix products, attention",
    OpKind.CONVOLUTION: "convolutions",
    OpKind.CONVOLUTION_BACKWARD: "convolutions",
    OpKind.DEPTHWISE: "depthwise convolutions",
    OpKind.DEPTHWISE_BACKWARD: "depthwise convolutions",
    OpKind.NORM: "norms",
    OpKind.NORM_BACKWARD: "norms",
    OpKind.SOFTMAX: "softmax, reductions, pooling",
    OpKind.REDUCTION: "softmax, reductions, pooling",
    OpKind.POOLING: "softmax, reductions, pooling",
    OpKind.ELEMENTWISE: "elementwise",
    OpKind.TRANSCENDENTAL: "elementwise",
    OpKind.RANDOM: "random, lookups, updates, other",
    OpKind.LOOKUP: "random, lookups, updates, other",
    OpKind.UPDATE: "random, lookups, updates, other",
    OpKind.OTHER: "random, lookups, updates, other",
}
