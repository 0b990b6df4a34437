"""Samples a second against batch size, as estimated for a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.show.axes import axes_for


def _apart(rows: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """The rows whose names have room on a logarithmic axis, the largest batch among them."""
    kept: list[tuple[int, float, float]] = []
    for row in sorted(rows, reverse=True):
        if not kept or kept[-1][0] >= 1.25 * row[0]:
            kept.append(row)
    return kept


def draw_throughput(path: Path, rows: Sequence[tuple[int, float, float]], *, title: str) -> None:
    """Samples a second against batch size; each row is a batch, its samples a second and its extra time."""
    with axes_for(path) as axes:
        axes.plot([batch for batch, _, _ in rows], [speed for _, speed, _ in rows], "o-", color="#2a7f3f")
        labelled = _apart(rows)
        for batch, speed, overhead in labelled:
            text = f"+{overhead:.0%}" if overhead > 0 else "no plan"
            axes.annotate(text, (batch, speed), (0, 8), textcoords="offset points", ha="center", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks([batch for batch, _, _ in labelled], [str(batch) for batch, _, _ in labelled], rotation=45)
        axes.minorticks_off()
        highest = max((speed for _, speed, _ in rows), default=1.0)
        axes.set(xlabel="batch size", ylabel="samples a second (estimated)", title=title, ylim=(0, 1.2 * highest))
