"""The figure of how it works: from a train step and a budget to a step that fits. Made by `python -m bench results`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.show.axes import axes_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One box: what is done, in which words, where the code is, and what comes out of it."""

    title: str
    lines: tuple[str, ...]
    room: str
    gives: str
    color: str


STAGES = (
    Stage(
        title="capture",
        lines=("forward, loss, backward", "and optimizer as one graph"),
        room="profiler/",
        gives="fx graph",
        color="#dce8f5",
    ),
    Stage(
        title="measure",
        lines=("time and workspace of", "every op; who keeps what"),
        room="profiler/",
        gives="typed graph",
        color="#dce8f5",
    ),
    Stage(
        title="plan",
        lines=("strategies propose: ilp,", "mutwo, sqrtn, yours;", "one simulator judges"),
        room="strategies/, planner/",
        gives="schedule",
        color="#e1f0e4",
    ),
    Stage(
        title="rewrite",
        lines=("replays the very schedule", "that was judged"),
        room="rewriter/",
        gives="graph module",
        color="#fae7da",
    ),
    Stage(
        title="prove",
        lines=("equal to your step to the", "bit; peak as predicted"),
        room="rewriter/",
        gives="",
        color="#fae7da",
    ),
)
WIDTH, GAP, HEIGHT = 2.3, 0.9, 1.5


def draw_pipeline(path: Path) -> None:
    """Five boxes from left to right, what goes in above the first, what comes out after the last."""
    with axes_for(path, width=12.0, height=2.7) as axes:
        for i, stage in enumerate(STAGES):
            _box(axes, i * (WIDTH + GAP), stage)
        end = len(STAGES) * (WIDTH + GAP) - GAP
        _note(axes, WIDTH / 2, "your train step, model,\noptimizer, batch")
        _note(axes, 2 * (WIDTH + GAP) + WIDTH / 2, "a budget: “4GiB”, “60%”")
        axes.annotate("", (end - WIDTH / 2, -0.55), (end - WIDTH / 2, 0), arrowprops=_ARROW)
        axes.text(end - WIDTH / 2, -0.6, "the same step, within the budget", ha="center", va="top", fontsize=10,
                  weight="bold", color="#222222")  # fmt: skip
        axes.set(xlim=(-0.15, end + 0.35), ylim=(-1.0, HEIGHT + 1.15))
        axes.set_axis_off()


_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "color": "#444444", "lw": 1.4, "shrinkA": 0, "shrinkB": 0}


def _box(axes: Any, x: float, stage: Stage) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, 0), WIDTH, HEIGHT, boxstyle=style, fc=stage.color, ec="#666666", lw=1.0))
    middle = x + WIDTH / 2
    axes.text(middle, HEIGHT - 0.1, stage.title, ha="center", va="top", fontsize=12, weight="bold", color="#222222")
    axes.text(middle, HEIGHT / 2, "\n".join(stage.lines), ha="center", va="center", fontsize=8.5, color="#333333")
    axes.text(middle, 0.07, stage.room, ha="center", va="bottom", fontsize=8, color="#555555", family="monospace")
    if stage.gives:
        axes.annotate("", (x + WIDTH + GAP, HEIGHT / 2), (x + WIDTH, HEIGHT / 2), arrowprops=_ARROW)
        axes.text(x + WIDTH + GAP / 2, HEIGHT / 2 + 0.07, stage.gives.replace(" ", "\n"), ha="center", va="bottom",
                  fontsize=8.5, color="#333333")  # fmt: skip


def _note(axes: Any, x: float, text: str) -> None:
    axes.annotate("", (x, HEIGHT), (x, HEIGHT + 0.45), arrowprops=_ARROW)
    axes.text(x, HEIGHT + 0.5, text, ha="center", va="bottom", fontsize=10, color="#222222")
