"""Peak and time against batch size, drawn from the rows of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.experiments.sweep.rows import SweepRow
from bench.show.axes import ROLE_COLORS, ROLE_NAMES, axes_beside, unit_for
from planner.ir import Role

WIDEST = 6.0  # the largest bar to the smallest, as far as one axis shows both with labels that can be read


def panels(rows: Sequence[SweepRow], size: Callable[[SweepRow], float]) -> list[list[SweepRow]]:
    """The rows that share an axis: all of them, or two groups where the largest is more than WIDEST times the smallest.

    These are the measured and the predicted ones; where all are of one kind, those below and above the widest step.
    """
    sizes = [size(row) for row in rows]
    known = [n for n in sizes if n]
    if not known or max(known) <= WIDEST * min(known):
        return [list(rows)]
    kinds = [[row for row in rows if row.measured is measured] for measured in (True, False)]
    if all(kinds):
        return kinds
    steps = [after / before if before else 0.0 for before, after in pairwise(sizes)]
    cut = 1 + steps.index(max(steps))
    return [list(rows[:cut]), list(rows[cut:])]


@contextmanager
def _batch_axes(
    path: Path, groups: Sequence[Sequence[SweepRow]], *, title: str, xlabel: str, margin: float
) -> Iterator[list[Any]]:
    """Axes for each group of batches; `margin` inches are for what stands beside the bars."""
    shares = [max(1.5, len(group)) for group in groups]
    with axes_beside(path, shares, width=margin + max(5.5, 1.3 * sum(shares))) as cells:
        cells[0].figure.suptitle(title, fontsize=11)
        cells[0].figure.supxlabel(xlabel, fontsize=10)
        for axes, group in zip(cells, groups, strict=True):
            labels = [f"{row.batch}" + ("" if row.measured else "\n(predicted)") for row in group]
            axes.set_xticks(range(len(group)), labels)
            axes.set_xlim(-0.6, max(1, len(group)) - 0.4)
            if len(groups) > 1:
                kind = "measured" if group[0].measured else "predicted"
                axes.set_title(kind if axes is cells[0] else f"{kind}, another scale", fontsize=9)
        yield cells


def draw_batch_peaks(path: Path, rows: Sequence[SweepRow], *, title: str) -> None:
    """Peak memory against batch size: two bars a batch, without and with a plan, stacked by role."""
    present = {name for row in rows for name in (*row.by_role_eager, *row.by_role_planned)}
    roles = [role for role in ROLE_COLORS if role.value in present]
    groups = panels(rows, _eager_bytes)
    xlabel = "batch size (left bar: without a plan, right bar: with)"
    with _batch_axes(path, groups, title=title, xlabel=xlabel, margin=2.5) as cells:
        for axes, group in zip(cells, groups, strict=True):
            _draw_peaks(axes, group, roles)
        handles = _peak_legend(rows, roles)
        cells[-1].legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _eager_bytes(row: SweepRow) -> int:
    return sum(row.by_role_eager.values())


def _draw_peaks(axes: Any, rows: Sequence[SweepRow], roles: Sequence[Role]) -> None:
    most_bytes = max((_eager_bytes(row) for row in rows), default=1)
    size, unit = unit_for(most_bytes)
    for i, row in enumerate(rows):
        hatch = "" if row.measured else "///"
        eager, planned = (_heights(by_role, roles, size) for by_role in (row.by_role_eager, row.by_role_planned))
        _stack(axes, i - 0.2, eager, hatch=hatch, faded=False)
        top = _stack(axes, i + 0.2, planned, hatch=hatch, faded=not row.fits)
        axes.text(i + 0.2, top + 0.01 * most_bytes / size, reduction_label(row), ha="center", va="bottom", fontsize=9)
    axes.set(ylabel=f"peak memory ({unit})", ylim=(0, 1.15 * most_bytes / size))


def _peak_legend(rows: Sequence[SweepRow], roles: Sequence[Role]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [Patch(color=ROLE_COLORS[role], label=ROLE_NAMES[role]) for role in reversed(roles)]
    if not all(row.measured for row in rows):
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="///", label="predicted, not run"))
    if any(not row.fits for row in rows):
        handles.append(Patch(color="#dddddd", label="pale: smallest peak found"))
    return handles


def _heights(by_role: dict[str, int], roles: Sequence[Role], size: int) -> dict[Role, float]:
    return {role: by_role.get(role.value, 0) / size for role in roles}


def _stack(axes: Any, x: float, heights: dict[Role, float], *, hatch: str, faded: bool) -> float:
    """One bar, stacked by role; returns its top. A faded one is a plan that does not fit."""
    bottom = 0.0
    for role, height in heights.items():
        axes.bar(x, height, 0.36, bottom=bottom, color=ROLE_COLORS[role], alpha=0.3 if faded else 1.0, hatch=hatch,
                 edgecolor="white" if hatch else "none", lw=0)  # fmt: skip
        bottom += height
    return bottom


def reduction_label(row: SweepRow) -> str:
    """What is written on the planned bar: by how much it is lower, or that no plan fits."""
    if not row.fits:
        return row.status.value.replace(" ", "\n")  # as wide as the bar
    less = 1 - sum(row.by_role_planned.values()) / sum(row.by_role_eager.values())
    return "same" if round(100 * less) == 0 else f"{-less:+.0%}".replace("-", "\N{MINUS SIGN}")


# Where a bar stands, its seconds, its name and its colour.
SIDES: tuple[tuple[float, Callable[[SweepRow], float | None], str, str], ...] = (
    (-0.2, lambda row: row.eager_s, "without a plan", "#8c8c8c"),
    (0.2, lambda row: row.planned_s, "with a plan", "#2a7f3f"),
)


def draw_batch_latency(path: Path, rows: Sequence[SweepRow], *, title: str) -> None:
    """Time of a step against batch size: two bars a batch, without and with a plan, and their ratio."""
    groups = panels(rows, lambda row: max(seconds(row) or 0.0 for _, seconds, _, _ in SIDES))
    with _batch_axes(path, groups, title=title, xlabel="batch size", margin=1.5) as cells:
        for axes, group in zip(cells, groups, strict=True):
            _draw_latency(axes, group)
        cells[0].legend(frameon=False, loc="upper left")


def _draw_latency(axes: Any, rows: Sequence[SweepRow]) -> None:
    taken = [seconds(row) for row in rows for _, seconds, _, _ in SIDES]
    highest = max((s for s in taken if s is not None), default=1.0)
    for side, seconds, label, color in SIDES:
        heights = [seconds(row) or 0.0 for row in rows]
        bars = axes.bar([i + side for i in range(len(rows))], heights, 0.36, color=color, label=label)
        for bar, row in zip(bars, rows, strict=True):
            if not row.measured:
                bar.set(hatch="///", edgecolor="white", lw=0)
    for i, row in enumerate(rows):
        axes.text(i + 0.2, (row.planned_s or 0.0) + 0.01 * highest, latency_label(row), ha="center", va="bottom",
                  fontsize=9)  # fmt: skip
    axes.set(ylabel="time of a step (s)", ylim=(0, 1.15 * highest))


def latency_label(row: SweepRow) -> str:
    """What is written on the planned bar: its ratio to the plain step, or why there is none."""
    if not row.fits:
        return row.status.value.replace(" ", "\n")  # as wide as the bar
    if row.eager_s is None or row.planned_s is None:
        return "not timed"
    return f"{row.planned_s / row.eager_s:.2f}x"
