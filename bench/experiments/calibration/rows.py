"""The rows of a calibration as tables and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from planner.units import human_bytes

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
