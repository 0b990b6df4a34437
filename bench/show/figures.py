"""Figures: a pure function gives the numbers of each, a thin one draws them. Matplotlib is imported to draw only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, assert_never

from bench.show.residency import Lifeline
from planner.analysis import liveness
from planner.extras import needs_extra
from planner.ir import Graph, Phase, Role
from planner.schedule import Schedule, unplanned_schedule
from planner.simulator import Timeline, bytes_by_role, simulate, unplanned
from planner.units import human_bytes
from planner.walk import Freed, Ran, walk

# One colour per role, chosen to be told apart in print and by the colour-blind.
ROLE_COLORS = {
    Role.PARAM: "#4c72b0",
    Role.BUFFER: "#64b5cd",
    Role.OPT_STATE: "#8172b3",
    Role.INPUT: "#8c8c8c",
    Role.OUTPUT: "#333333",
    Role.GRADIENT: "#dd8452",
    Role.TEMP: "#ccb974",
    Role.ACTIVATION: "#55a868",
}
PHASE_COLORS = {Phase.FORWARD: "#eef5ee", Phase.BACKWARD: "#fdf1ea", Phase.OPTIMIZER: "#f1eef7"}
ROLE_NAMES = {Role.PARAM: "parameters", Role.BUFFER: "buffers", Role.OPT_STATE: "optimizer state"}
ROLE_NAMES |= {Role.INPUT: "batch", Role.OUTPUT: "outputs", Role.GRADIENT: "gradients", Role.TEMP: "temporaries"}
ROLE_NAMES |= {Role.ACTIVATION: "activations"}
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def unit_for(nbytes: float) -> tuple[int, str]:
    """The unit of an axis that ends at `nbytes`: its size and its name."""
    return next((unit for unit in UNITS if nbytes >= unit[0]), UNITS[-1])


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
        peak_ms=next((ran.start_us / 1e3 for position, ran in runs if position == timeline.peak_step), 0.0),
        peak_bytes=timeline.peak_bytes,
    )


def _runs(graph: Graph, schedule: Schedule) -> list[tuple[int, Ran]]:
    """Every run with the position of its step."""
    runs: list[tuple[int, Ran]] = []
    for position, event in enumerate(walk(graph, schedule)):
        match event:
            case Ran():
                runs.append((position, event))
            case Freed():
                pass  # takes no time of its own
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """An activation among the largest."""

    name: str
    module: str
    nbytes: int
    inactive_us: float


def largest_activations(graph: Graph, *, most: int = 20) -> list[Largest]:
    """The largest activations, the largest first."""
    rows = [
        Largest(
            name=graph.storage_names[s.id],
            module=graph.ops[graph.maker[s.id] or 0].module_path,
            nbytes=s.nbytes,
            inactive_us=liveness(graph)[s.id].inactive_us,
        )
        for s in graph.storages
        if s.role is Role.ACTIVATION
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.name))[:most]


def time_by_kind(graph: Graph, *, most: int = 12) -> list[tuple[str, dict[Phase, float], int]]:
    """(kind of op, µs per phase, number of ops), the dearest kind first; the rest is summed up in the last row."""
    totals: dict[str, dict[Phase, float]] = {}
    counts: dict[str, int] = {}
    for op in graph.ops:
        kind = short_target(op.target)
        totals.setdefault(kind, dict.fromkeys(Phase, 0.0))[op.phase] += op.time_us
        counts[kind] = counts.get(kind, 0) + 1
    ranked = sorted(totals, key=lambda kind: (-sum(totals[kind].values()), kind))
    rows = [(kind, totals[kind], counts[kind]) for kind in ranked[:most]]
    if rest := ranked[most:]:
        summed = {phase: sum(totals[kind][phase] for kind in rest) for phase in Phase}
        rows.append((f"{len(rest)} others", summed, sum(counts[kind] for kind in rest)))
    return rows


def short_target(target: str) -> str:
    """'convolution_backward' for 'aten.convolution_backward.default'."""
    pieces = target.removeprefix("fresh ").split(".")
    return pieces[1] if len(pieces) > 1 else target


# -- drawing ----------------------------------------------------------------------------------------------------


@contextmanager
def axes_for(path: Path, *, width: float = 9.0, height: float = 4.5) -> Iterator[Any]:
    """Axes to draw on; saved to `path` when done."""
    with axes_beside(path, [1], width=width, height=height) as (axes,):
        yield axes


@contextmanager
def axes_beside(path: Path, shares: Sequence[float], *, width: float, height: float = 4.5) -> Iterator[list[Any]]:
    """Axes side by side, as wide as their shares; saved to `path` when done."""
    with needs_extra("bench"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            1, len(shares), figsize=(width, height), layout="constrained", squeeze=False, width_ratios=shares
        )
        try:
            yield list(grid[0])
            figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


def draw_memory(path: Path, curves: Sequence[Curve], *, title: str, budget_bytes: int | None = None) -> None:
    """Memory over time, one line per curve on one axis; recomputation is marked under the lines."""
    highest = max(c.peak_bytes for c in curves)
    size, unit = unit_for(highest)
    with axes_for(path) as axes:
        end = max(c.ms[-1] for c in curves)
        _shade_phases(axes, curves[0], curves[0].ms[-1])
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


def _shade_phases(axes: Any, c: Curve, end: float) -> None:
    starts = [ms for ms, _ in c.borders]
    for (start, phase), stop in zip(c.borders, [*starts[1:], end], strict=True):
        axes.axvspan(start, stop, color=PHASE_COLORS[phase], lw=0, zorder=0)
        if stop - start > 0.08 * end:
            axes.text((start + stop) / 2, 0.985, phase.value, ha="center", va="top", fontsize=9, color="#666666",
                      transform=axes.get_xaxis_transform())  # fmt: skip


SPAN_COLORS = {"kept": "#4c72b0", "dropped": "#55a868", "recomputed": "#dd8452"}


def draw_plan(path: Path, lines: Sequence[Lifeline], line: Curve, *, title: str) -> None:
    """When each activation is in memory over the executed step: kept, dropped, computed again. One row each."""
    with axes_for(path, width=11.0, height=1.5 + 0.2 * max(8, len(lines))) as axes:
        _shade_phases(axes, line, line.ms[-1])
        for y, life in enumerate(lines):
            _draw_lifeline(axes, y, life)
        axes.set_yticks(range(len(lines)), [f"{n.name}  {human_bytes(n.nbytes)}" for n in lines], fontsize=7)
        axes.set_ylim(len(lines) - 0.4, -1.6)  # room for the names of the phases
        for first, last, name in module_groups([life.module for life in lines]):
            axes.axhline(last + 0.5, color="#bbbbbb", lw=0.6)
            axes.text(1.008, (first + last) / 2, name, va="center", fontsize=8, transform=axes.get_yaxis_transform())
        axes.set(xlabel="time in the planned step (ms)", title=title, xlim=(0, line.ms[-1]))
        axes.legend(handles=_plan_legend(), loc="upper center", bbox_to_anchor=(0.45, -0.55 / (0.2 * len(lines) + 1)),
                    ncols=4, frameon=False, fontsize=9)  # fmt: skip


def _draw_lifeline(axes: Any, y: int, life: Lifeline) -> None:
    for before, after in pairwise(life.spans):
        axes.plot([before.end_ms, after.start_ms], [y, y], color="#999999", lw=0.8, ls=":")
    for span in life.spans:
        color = SPAN_COLORS["recomputed" if span.recomputed else life.choice.value]
        axes.plot([span.start_ms, span.end_ms], [y, y], color=color, lw=4.5, solid_capstyle="butt")
        if span.recomputed:
            axes.plot([span.start_ms], [y], marker=">", color="#8c3b0c", ms=5, mew=0)


def _plan_legend() -> list[Any]:
    from matplotlib.lines import Line2D

    texts = {"kept": "kept", "dropped": "dropped after its last forward use", "recomputed": "in memory again"}
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


def draw_memory_by_role(path: Path, graph: Graph, schedule: Schedule, *, title: str) -> None:
    """Memory over time, stacked by role, with the peak and the phases marked."""
    timeline = simulate(graph, schedule)
    line = curve(graph, schedule, timeline, label="")
    series = bytes_by_role(graph, schedule)
    size, unit = unit_for(line.peak_bytes)
    with axes_for(path) as axes:
        order = [role for role in ROLE_COLORS if role in series]
        stacked = [[series[role][i] / size for i in (*line.steps, line.steps[-1])] for role in order]
        _shade_phases(axes, line, line.ms[-1])
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


def draw_peak_breakdown(path: Path, timeline: Timeline, *, title: str) -> None:
    """What the peak consists of, one bar per role."""
    parts = sorted(timeline.peak_by_role, key=lambda part: part[1])
    largest = max((n for _, n in parts), default=1)
    size, unit = unit_for(largest)
    with axes_for(path, height=3.2) as axes:
        bars = axes.barh(
            [ROLE_NAMES[role] for role, _ in parts],
            [n / size for _, n in parts],
            color=[ROLE_COLORS[role] for role, _ in parts],
        )
        labels = [f" {human_bytes(n)} ({n / timeline.peak_bytes:.0%})" for _, n in parts]
        axes.bar_label(bars, labels, fontsize=9)
        axes.set(xlabel=f"live memory at the peak ({unit})", title=title, xlim=(0, 1.3 * largest / size))


def draw_largest(path: Path, rows: Sequence[Largest], *, title: str) -> None:
    """The largest activations, with how long each lies idle."""
    with axes_for(path, height=0.5 + 0.27 * max(4, len(rows))) as axes:
        labels = [f"{row.name}\n{row.module}" if row.module else row.name for row in rows]
        bars = axes.barh(range(len(rows)), [row.nbytes / 2**20 for row in rows], color=ROLE_COLORS[Role.ACTIVATION])
        axes.bar_label(bars, [f" idle {row.inactive_us / 1e3:,.0f} ms" for row in rows], fontsize=8)
        axes.set_yticks(range(len(rows)), [label.replace("\n", "  ") for label in labels], fontsize=8)
        axes.invert_yaxis()
        largest = max((row.nbytes for row in rows), default=1)
        axes.set(xlabel="size (MiB)", title=title, xlim=(0, 1.2 * largest / 2**20))


def draw_time_by_kind(path: Path, rows: Sequence[tuple[str, dict[Phase, float], int]], *, title: str) -> None:
    """Op time by kind, split by phase."""
    colors = {Phase.FORWARD: "#55a868", Phase.BACKWARD: "#dd8452", Phase.OPTIMIZER: "#8172b3"}
    with axes_for(path, height=0.6 + 0.3 * max(4, len(rows))) as axes:
        left = [0.0] * len(rows)
        for phase, color in colors.items():
            widths = [us[phase] / 1e3 for _, us, _ in rows]
            bars = axes.barh(range(len(rows)), widths, left=left, color=color, label=phase.value)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        total = sum(left) or 1.0
        axes.bar_label(bars, [f" {ms / total:.0%} of time, {n} ops" for ms, (_, _, n) in zip(left, rows, strict=True)],
                       fontsize=8)  # fmt: skip
        axes.set_yticks(range(len(rows)), [kind for kind, _, _ in rows], fontsize=9)
        axes.invert_yaxis()
        axes.set(xlabel="time (ms)", title=title, xlim=(0, 1.3 * max(left, default=1.0)))
        axes.legend(loc="lower right", frameon=False)


def unplanned_curve(graph: Graph) -> Curve:
    """Memory over time of the step as it is."""
    return curve(graph, unplanned_schedule(graph), unplanned(graph), label="unplanned")
