"""Planned steps and what users would pick instead, side by side: one table, one figure of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from bench.experiments.comparison.rows import PeerRow, PlannedRow
from bench.experiments.experiment import Experiment, Results
from bench.show.axes import axes_for
from bench.workloads.peers import is_ours


class Whose(Enum):
    """Who made a contender, as a legend has it."""

    STEP = "planned step"
    MODEL = "planned model"
    OTHER = "what else there is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to train, relative to eager in the same run; `why_not` says why there is nothing to show."""

    name: str
    whose: Whose
    peak_ratio: float | None
    time_ratio: float | None
    time_low: float | None
    time_high: float | None
    cpu_ratio: float | None
    exact: bool | None
    gap: float | None
    plan_s: float | None
    apply_s: float | None
    why_not: str


def contenders(rows: Sequence[PlannedRow | PeerRow]) -> list[Contender]:
    """Rows of `python -m bench --peers` from the smallest peak to the largest; those that failed come last."""
    found = [_peer(row) if isinstance(row, PeerRow) else _planned(row) for row in rows]
    return sorted(found, key=lambda c: (c.peak_ratio is None, c.peak_ratio or 0.0, c.name))


def _planned(row: PlannedRow) -> Contender:
    liberties = (("freed gradients", row.free_gradients), ("early updates", row.early_updates))
    return Contender(
        name=", ".join([row.strategy, f"budget {row.budget}", *(words for words, taken in liberties if taken)]),
        whose=Whose.STEP,
        peak_ratio=row.step_share,
        time_ratio=row.measured_ratio,
        time_low=row.ratio_low,
        time_high=row.ratio_high,
        cpu_ratio=row.cpu_ratio,
        exact=row.exact,
        gap=row.gap,
        plan_s=row.plan_s,
        apply_s=row.apply_s,
        why_not="" if row.measured_ratio is not None else row.note,
    )


def _peer(row: PeerRow) -> Contender:
    return Contender(
        name=row.peer,
        whose=Whose.MODEL if is_ours(row.peer) else Whose.OTHER,
        peak_ratio=row.peak_ratio,
        time_ratio=row.time_ratio,
        time_low=row.time_low,
        time_high=row.time_high,
        cpu_ratio=row.cpu_ratio,
        exact=row.exact,
        gap=None,
        plan_s=None,
        apply_s=None,
        why_not=row.error or row.first_mismatch or row.promise,
    )


COLUMNS = (
    "what", "peak", "time", "quartiles", "CPU time", "every bit equal", "proven gap", "plan s", "apply s", "remark",
)  # fmt: skip


def contender_cells(c: Contender) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS: ours in bold."""
    return (
        c.name if c.whose is Whose.OTHER else f"**{c.name}**",
        "-" if c.peak_ratio is None else f"{c.peak_ratio:.2f}",
        "-" if c.time_ratio is None else f"{c.time_ratio:.2f}x",
        "-" if c.time_low is None else f"{c.time_low:.2f}-{c.time_high:.2f}",
        "-" if c.cpu_ratio is None else f"{c.cpu_ratio:.2f}x",
        "-" if c.exact is None else ("yes" if c.exact else "NO"),
        "-" if c.gap is None else f"{c.gap:.1%}",
        "-" if c.plan_s is None else f"{c.plan_s:.1f}",
        "-" if c.apply_s is None else f"{c.apply_s:.1f}",
        c.why_not,
    )


def draw_contenders(path: Path, rows: Sequence[Contender], *, title: str) -> None:
    """Time against peak, both relative to eager: further left and further down is better."""
    with axes_for(path, width=8.5, height=5.2) as axes:
        axes.plot(1.0, 1.0, "k+", markersize=12, label="eager")
        for whose in Whose:
            _draw_side(axes, [c for c in rows if c.whose is whose and c.time_ratio is not None], whose)
        _label(axes, [c for c in rows if c.time_ratio is not None])
        axes.set_xlabel("peak that the step adds to memory, relative to eager")
        axes.set_ylabel("time of a step, relative to eager")
        axes.set_title(title)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(loc="best", fontsize=8)


# Told apart by marker as well: in grey print, and by the colour-blind.
_MARKERS = {Whose.STEP: ("o", "#1b6ca8"), Whose.MODEL: ("D", "#2f8f6b"), Whose.OTHER: ("s", "#b5543b")}


def _draw_side(axes: Any, rows: Sequence[Contender], whose: Whose) -> None:
    marker, color = _MARKERS[whose]
    for exact in (True, False):
        side = [c for c in rows if bool(c.exact) is exact]
        if not side:
            continue
        axes.errorbar(
            [c.peak_ratio for c in side],
            [c.time_ratio for c in side],
            yerr=list(zip(*(_spread(c) for c in side), strict=True)),
            fmt=marker,
            color=color,
            markerfacecolor=None if exact else "white",
            capsize=2,
            linewidth=1,
            label=f"{whose.value}, every bit equal" if exact else f"{whose.value}, results differ from eager's",
        )


def _label(axes: Any, rows: Sequence[Contender]) -> None:
    """A name beside every point, lower where a neighbour's name would be covered."""
    line = 0.03 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    named: list[tuple[float, float]] = []
    for c in sorted(rows, key=lambda c: -(c.time_ratio or 0.0)):
        x, y = (c.peak_ratio or 0.0) + 0.006, (c.time_ratio or 0.0) + 0.3 * line
        while any(abs(x - left) < 0.1 and abs(y - height) < line for left, height in named):
            y -= 0.25 * line
        axes.text(x, y, _short(c.name), fontsize=7)
        named.append((x, y))


def _spread(c: Contender) -> tuple[float, float]:
    """How far the quartiles lie below and above the median."""
    if c.time_ratio is None or c.time_low is None or c.time_high is None:
        return 0.0, 0.0
    return max(0.0, c.time_ratio - c.time_low), max(0.0, c.time_high - c.time_ratio)


def _short(name: str) -> str:
    shorter = {
        "torch.utils.checkpoint, ": "checkpoint ",
        "selective checkpointing, products saved": "selective",
        "checkpoint_sequential, 2 segments a stage": "sequential",
        "Hugging Face gradient checkpointing": "Hugging Face",
        "planned model + inductor": "model + inductor",
        "planned model": "model",
        "PyTorch partitioner, budget ": "partitioner ",
        "inductor, memory budget ": "inductor ",
        ", budget ": " ",
    }
    for long, short in shorter.items():
        name = name.replace(long, short)
    return name


def _draw(results: Results[PlannedRow | PeerRow]) -> list[Path]:
    path = results.path.with_suffix(".png")
    draw_contenders(path, contenders(results.rows), title=f"{results.rows[0].model}: time against memory")
    return [path]


COMPARISON: Experiment[PlannedRow | PeerRow] = Experiment(
    kind="comparison",
    rows=(PlannedRow, PeerRow),
    table=lambda rows: (COLUMNS, [contender_cells(c) for c in contenders(rows)]),
    draw=_draw,
)
