"""Memory over the time of a step, drawn: the step as it is and planned, and by role."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from bench.show.axes import PHASE_COLORS, ROLE_COLORS, ROLE_NAMES, axes_for, unit_for
from planner.ir import Graph, Phase
from planner.schedule import Schedule, unplanned_schedule
from planner.simulator import Timeline, bytes_by_role, simulate, unplanned
from planner.units import human_bytes
from planner.walk import Freed, Launched, Ran, Waited, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Memory over the execution: at the start of each run, its time in ms and the bytes during it."""

    label: str
    ms: tuple[float, ...]
    nbytes: tuple[int, ...]
    steps: tuple[int, ...]  # the position in the schedule of each run
    rerun_ms: tuple[tuple[float, float], ...]  # start and end of each stretch of recomputation
    borders: tuple[tuple[float, Phase], ...]  # where a phase begins
    peak_ms: float
    peak_bytes: int


def curve(graph: Graph, schedule: Schedule, timeline: Timeline, *, label: str) -> Curve:
    """The numbers of a memory-over-time figure."""
    runs = _runs(graph, schedule)
    end_ms = runs[-1][1].end_us / 1e3 if runs else 0.0
    live = [timeline.bytes_at[position] for position, _ in runs]
    return Curve(
        label=label,
        ms=(*(ran.start_us / 1e3 for _, ran in runs), end_ms),
        nbytes=(*live, live[-1] if live else 0),
        steps=tuple(position for position, _ in runs),
        rerun_ms=tuple(_joined([(ran.start_us / 1e3, ran.end_us / 1e3) for _, ran in runs if ran.again])),
        borders=tuple(_borders(graph, [ran for _, ran in runs if not ran.again])),
        peak_ms=next((ran.start_us / 1e3 for position, ran in runs if position >= timeline.peak_step), 0.0),
        peak_bytes=timeline.peak_bytes,
    )


def _runs(graph: Graph, schedule: Schedule) -> list[tuple[int, Ran]]:
    """Every run with the position of its step."""
    runs: list[tuple[int, Ran]] = []
    for position, event in enumerate(walk(graph, schedule)):
        match event:
            case Ran():
                runs.append((position, event))
            case Freed() | Launched() | Waited():
                pass  # no run of its own: a wait shows as the time until the next
            case _:
                assert_never(event)
    return runs


def _borders(graph: Graph, originals: Sequence[Ran]) -> list[tuple[float, Phase]]:
    """Where a phase begins."""
    # Updates of single parameters in the middle of a backward are no phase of their own.
    last_pass = max((op.id for op in graph.ops if op.phase is not Phase.OPTIMIZER), default=-1)
    borders: list[tuple[float, Phase]] = []
    for ran in originals:
        if borders and borders[-1][1] is ran.op.phase:
            continue
        if ran.op.phase is not Phase.OPTIMIZER or ran.op.id > last_pass:
            borders.append((ran.start_us / 1e3, ran.op.phase))
    return borders


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] < 1e-9:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def unplanned_curve(graph: Graph) -> Curve:
    """Memory over time of the step as it is."""
    return curve(graph, unplanned_schedule(graph), unplanned(graph), label="unplanned")


def draw_memory(path: Path, curves: Sequence[Curve], *, title: str, budget_bytes: int | None = None) -> None:
    """Memory over time, one line per curve on one axis; recomputation is marked under the lines."""
    highest = max(c.peak_bytes for c in curves)
    size, unit = unit_for(highest)
    with axes_for(path) as axes:
        end = max(c.ms[-1] for c in curves)
        shade_phases(axes, curves[0], curves[0].ms[-1])
        for i, c in enumerate(curves):
            color = ("#444444", "#2a7f3f", "#b3541e", "#5a4a9c")[i % 4]
            axes.step(c.ms, [n / size for n in c.nbytes], where="post", color=color, lw=1.1, label=c.label)
            axes.plot([c.peak_ms], [c.peak_bytes / size], "o", color=color, ms=5)
            for start, stop in c.rerun_ms:
                axes.plot([start, stop], [0.012 * (i + 1)] * 2, color=color, lw=3, solid_capstyle="butt",
                          transform=axes.get_xaxis_transform())  # fmt: skip
        if budget_bytes is not None:
            axes.axhline(
                budget_bytes / size, color="#aa2222", lw=1, ls="--", label=f"budget {human_bytes(budget_bytes)}"
            )
        axes.set(xlabel="time in the step (ms)", ylabel=f"live memory ({unit})", xlim=(0, end))
        axes.set_title(textwrap.fill(title, 95))
        axes.set_ylim(bottom=0, top=1.12 * highest / size)
        axes.legend(loc="lower left", bbox_to_anchor=(0.01, 0.06), frameon=False)


def shade_phases(axes: Any, c: Curve, end: float) -> None:
    starts = [ms for ms, _ in c.borders]
    for (start, phase), stop in zip(c.borders, [*starts[1:], end], strict=True):
        axes.axvspan(start, stop, color=PHASE_COLORS[phase], lw=0, zorder=0)
        if stop - start > 0.08 * end:
            axes.text((start + stop) / 2, 0.985, phase.value, ha="center", va="top", fontsize=9, color="#666666",
                      transform=axes.get_xaxis_transform())  # fmt: skip


def draw_memory_by_role(path: Path, graph: Graph, schedule: Schedule, *, title: str) -> None:
    """Memory over time, stacked by role, with the peak and the phases marked."""
    timeline = simulate(graph, schedule)
    line = curve(graph, schedule, timeline, label="")
    series = bytes_by_role(graph, schedule)
    size, unit = unit_for(line.peak_bytes)
    with axes_for(path) as axes:
        order = [role for role in ROLE_COLORS if role in series]
        stacked = [[series[role][i] / size for i in (*line.steps, line.steps[-1])] for role in order]
        shade_phases(axes, line, line.ms[-1])
        axes.stackplot(line.ms, stacked, colors=[ROLE_COLORS[r] for r in order], labels=[ROLE_NAMES[r] for r in order],
                       step="post", lw=0)  # fmt: skip
        axes.plot([line.peak_ms], [line.peak_bytes / size], "kv", ms=6)
        axes.annotate(f"peak {human_bytes(line.peak_bytes)}", (line.peak_ms, line.peak_bytes / size), (0, 8),
                      textcoords="offset points", ha="center", fontsize=9)  # fmt: skip
        axes.set(xlabel="time in the step (ms)", ylabel=f"live memory ({unit})", title=title, xlim=(0, line.ms[-1]))
        axes.set_ylim(0, 1.25 * line.peak_bytes / size)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9
        )
