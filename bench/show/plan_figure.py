"""A plan, drawn: when each activation is in memory, what is dropped, and where it is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.show.activation_spans import Lifeline
from bench.show.axes import axes_for
from bench.show.memory_figures import Curve, shade_phases
from planner.units import human_bytes

SPAN_COLORS = {
    "kept": "#4c72b0",
    "dropped": "#55a868",
    "recomputed": "#dd8452",
    "moved to the host": "#8172b3",
    "brought": "#c44e9a",
}


def draw_plan(path: Path, lines: Sequence[Lifeline], line: Curve, *, title: str) -> None:
    """When each activation is in memory over the executed step: kept, dropped, computed again. One row each."""
    with axes_for(path, width=11.0, height=1.5 + 0.2 * max(8, len(lines))) as axes:
        shade_phases(axes, line, line.ms[-1])
        for y, life in enumerate(lines):
            _draw_lifeline(axes, y, life)
        axes.set_yticks(range(len(lines)), [f"{n.name}  {human_bytes(n.nbytes)}" for n in lines], fontsize=7)
        axes.set_ylim(len(lines) - 0.4, -1.6)  # room for the names of the phases
        for first, last, name in module_groups([life.module for life in lines]):
            axes.axhline(last + 0.5, color="#bbbbbb", lw=0.6)
            axes.text(1.008, (first + last) / 2, name, va="center", fontsize=8, transform=axes.get_yaxis_transform())
        axes.set(xlabel="time in the planned step (ms)", title=title, xlim=(0, line.ms[-1]))
        moving = any(span.brought for life in lines for span in life.spans)
        below = (0.45, -0.55 / (0.2 * len(lines) + 1))
        axes.legend(handles=_plan_legend(moving=moving), loc="upper center", bbox_to_anchor=below, ncols=4,
                    frameon=False, fontsize=9)  # fmt: skip


def _draw_lifeline(axes: Any, y: int, life: Lifeline) -> None:
    for before, after in pairwise(life.spans):
        axes.plot([before.end_ms, after.start_ms], [y, y], color="#999999", lw=0.8, ls=":")
    for span in life.spans:
        again = "recomputed" if span.recomputed else "brought" if span.brought else life.choice.value
        color = SPAN_COLORS[again]
        axes.plot([span.start_ms, span.end_ms], [y, y], color=color, lw=4.5, solid_capstyle="butt")
        if span.recomputed:
            axes.plot([span.start_ms], [y], marker=">", color="#8c3b0c", ms=5, mew=0)


def _plan_legend(*, moving: bool) -> list[Any]:
    from matplotlib.lines import Line2D

    texts = {"kept": "kept", "dropped": "dropped after its last forward use", "recomputed": "in memory again"}
    if moving:
        texts |= {"moved to the host": "moved to the host after it", "brought": "back, or on its way"}
    bars: list[Any] = [Line2D([], [], color=SPAN_COLORS[key], lw=4.5, label=text) for key, text in texts.items()]
    return [*bars, Line2D([], [], color="#8c3b0c", marker=">", ls="none", label="recomputed here")]


def module_groups(modules: Sequence[str], *, most: int = 16) -> list[tuple[int, int, str]]:
    """(first, last, module) of neighbours in one module, as deep in the tree as leaves at most `most` groups."""
    deepest = max((module.count(".") + 1 for module in modules), default=1)
    for depth in range(deepest, 0, -1):
        groups: list[tuple[int, int, str]] = []
        for i, module in enumerate(modules):
            name = ".".join(module.split(".")[:depth])
            if groups and groups[-1][2] == name:
                groups[-1] = (groups[-1][0], i, name)
            else:
                groups.append((i, i, name))
        if len(groups) <= most:
            break
    return groups
