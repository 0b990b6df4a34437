"""Estimated against measured op times, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.calibration.rows import CalibrationRow
from bench.show.axes import axes_in_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """One panel: (group, estimated µs, measured µs) of every op."""

    title: str
    points: tuple[tuple[str, float, float], ...]


GROUP_COLORS = ("#4c72b0", "#dd8452", "#c44e52", "#55a868", "#8172b3", "#937860", "#8c8c8c", "#da8bc3")


def draw_estimates(path: Path, panels: Sequence[Estimates], *, title: str) -> None:
    """Estimated against measured op times, one panel a model; on the line they agree, between the dashes within 2x."""
    groups = sorted({group for panel in panels for group, _, _ in panel.points})
    times = [us for panel in panels for _, *pair in panel.points for us in pair]
    span = (0.7 * min(times), 1.4 * max(times))
    with axes_in_grid(path, len(panels) + 1, title=title) as cells:
        for axes, panel in zip(cells, panels, strict=False):
            _draw_panel(axes, panel, groups, span)
        handles, labels = cells[0].get_legend_handles_labels()
        cells[len(panels)].legend(handles, labels, loc="center left", frameon=False, markerscale=2.5, fontsize=10)


def _draw_panel(axes: Any, panel: Estimates, groups: Sequence[str], span: tuple[float, float]) -> None:
    axes.set_axis_on()
    for group, color in zip(groups, GROUP_COLORS, strict=False):
        pairs = [(measured, estimated) for name, estimated, measured in panel.points if name == group]
        axes.plot([x for x, _ in pairs], [y for _, y in pairs], "o", ms=3, mew=0, alpha=0.6, color=color, label=group)
    axes.plot(span, span, "k-", lw=1, label="estimated = measured")
    for factor, label in ((0.5, None), (2.0, "off by 2x")):
        axes.plot(span, [factor * us for us in span], "k--", lw=0.7, label=label)
    axes.set(xscale="log", yscale="log", xlim=span, ylim=span, title=panel.title)
    axes.set(xlabel="measured time of an op (µs)", ylabel="estimated (µs)")


def draw_points(path: Path, rows: Sequence[CalibrationRow]) -> list[Path]:
    """The figure of every op, one panel a model; none where rows were saved without their points."""
    if not rows or any(not row.points for row in rows):
        return []
    title = f"Op times {rows[0].times[0]}, against those measured on it"
    draw_estimates(path, [panel(row) for row in rows], title=title)
    return [path]


def panel(row: CalibrationRow) -> Estimates:
    """One model's part of the figure."""
    shown = (
        (group, estimated_us, measured_us)
        for group, times in row.points.items()
        for estimated_us, measured_us in zip(times.estimated_us, times.measured_us, strict=True)
    )
    ratio = row.estimated_us / row.measured_us
    return Estimates(title=f"{row.model}: estimated {ratio:.2f}x measured", points=tuple(shown))
