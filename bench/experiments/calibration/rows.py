"""The rows of a calibration, as tables and sentences."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.experiments.experiment import Table
from planner.units import human_bytes
from profiler.estimating.kinds import OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Estimated and measured time of some ops that are not views, and how far they lie apart."""

    ops: int
    estimated_us: float
    measured_us: float
    median_factor: float  # of the middle op: 2.0 is twice or half as long
    misplaced_share: float  # Σ|estimated - measured| to Σ measured


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow(Sums):
    """All ops of one kind."""

    kind: OpKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPlan:
    """What a plan costs on the measured graph, wherever it was made; None without a plan."""

    overhead: float | None
    peak_bytes: int | None
    over_bytes: int | None
    solve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPair:
    """One strategy's plans on the estimated and on the measured graph for the same bytes."""

    strategy: str
    budget: str
    budget_bytes: int
    above_start_bytes: int
    from_measured: JudgedPlan
    from_estimated: JudgedPlan
    estimated_overhead: float | None  # as the estimated graph has it
    estimated_peak_bytes: int | None

    @property
    def extra(self) -> float | None:
        """How much more overhead the plan made from estimates has; None where the other does not fit, or is none."""
        own, other = self.from_measured, self.from_estimated
        if own.overhead is None or other.overhead is None or own.over_bytes:
            return None
        return other.overhead - own.overhead

    @property
    def over_share(self) -> float:
        """By how much the plan made from estimates is over budget, to what the step may add."""
        return (self.from_estimated.over_bytes or 0) / self.above_start_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of the same ops, column by column."""

    estimated_us: tuple[float, ...]
    measured_us: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow(Sums):
    """One model: its ops, the plans made for it, and the points of the figure, which a file may leave out."""

    model: str
    times: tuple[str, str]  # where the estimated and the measured ones come from
    rank_correlation: float | None
    weighted_rank_correlation: float | None
    kinds: tuple[KindRow, ...]
    plans: tuple[PlanPair, ...]
    points: dict[str, Times] = field(default_factory=dict)  # by group of kinds


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


def summary(rows: Sequence[CalibrationRow]) -> str:
    """The whole report in three sentences."""
    totals = [row.estimated_us / row.measured_us for row in rows]
    ordered = [row.rank_correlation for row in rows if row.rank_correlation is not None]
    fair = [(plan.extra, plan.over_share) for row in rows for plan in row.plans if plan.extra is not None]
    extra, over = [e for e, _ in fair], [share for _, share in fair]
    text = f"Totals are {min(totals):.2f}x to {max(totals):.2f}x the measured ones"
    text += f", rank correlations {min(ordered):.2f} to {max(ordered):.2f}." if ordered else "."
    if not fair:
        return text + " No plan from measured times fits its budget, so that there is nothing to compare."
    broken = sum(share > 0 for share in over)
    return text + (
        f" Under measured times, a plan made from estimates costs {100 * statistics.mean(extra):+.2f} points of the "
        f"step more than one made from measurements (mean of {len(fair)}; worst {100 * max(extra):+.2f}). On the "
        f"measured graph {broken} of {len(fair)} of them {'is' if broken == 1 else 'are'} over budget"
        + (f", by {max(over):.1%} of what the step may add at most." if broken else ".")
    )


def calibration_cells(row: CalibrationRow) -> tuple[str, ...]:
    """A model as text, in the order of COLUMNS."""
    return (
        row.model,
        f"{row.ops:,}",
        *_sums(row),
        _rank(row.rank_correlation),
        _rank(row.weighted_rank_correlation),
        f"{row.median_factor:.2f}x",
        f"{row.misplaced_share:.0%}",
    )


def _rank(correlation: float | None) -> str:
    return "-" if correlation is None else f"{correlation:.3f}"


def _sums(row: Sums) -> tuple[str, str, str]:
    measured, guessed = row.measured_us, row.estimated_us
    return f"{measured / 1e3:,.1f}", f"{guessed / 1e3:,.1f}", f"{guessed / measured:.2f}x"


def more_tables(rows: Sequence[CalibrationRow]) -> list[tuple[str, Table]]:
    """Titles and tables of what lies inside the rows: plans, and errors by kind."""
    plans = [plan_cells(row.model, plan) for row in rows for plan in row.plans]
    kinds = [
        (row.model, kind.kind.value, f"{kind.ops:,}", *_sums(kind), f"{kind.median_factor:.2f}x")
        for row in rows
        for kind in row.kinds
    ]
    return [
        ("Plans made from estimates, judged on measured times", (PLAN_COLUMNS, plans)),
        ("Estimated against measured by kind of op", (KIND_COLUMNS, kinds)),
    ]


def plan_cells(model: str, plan: PlanPair) -> tuple[str, ...]:
    """A plan as text, in the order of PLAN_COLUMNS."""
    other = plan.from_estimated
    over = other.over_bytes
    fits = "-" if over is None else "within budget" if not over else f"over by {human_bytes(over)}"
    if over:
        fits += f" ({over / plan.above_start_bytes:.1%} of what the step may add)"
    return (
        model,
        plan.budget,
        plan.strategy,
        _overhead(plan.from_measured),
        _overhead(other),
        "-" if plan.estimated_overhead is None else f"{plan.estimated_overhead:.2%}",
        fits,
    )


def _overhead(judged: JudgedPlan) -> str:
    if judged.overhead is None:
        return "no plan"
    return f"{judged.overhead:.2%}" + (" (over)" if judged.over_bytes else "")
