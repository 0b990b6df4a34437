"""Figures: a pure function gives the numbers of each, a thin one draws them. Matplotlib is imported to draw only."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.lifelines import Lifeline
from planner.ir import Graph, Phase, Role
from planner.plan import Plan
from planner.schedule import Run, RunKind, Schedule, lower
from planner.simulator import Timeline, bytes_by_role, simulate
from planner.units import human_bytes

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
    rerun_ms: tuple[tuple[float, float], ...]  # start and end of each stretch of recomputation
    borders: tuple[tuple[float, Phase], ...]  # where a phase begins
    peak_ms: float
    peak_bytes: int


def curve(graph: Graph, schedule: Schedule, timeline: Timeline, *, label: str) -> Curve:
    """The numbers of a memory-over-time figure."""
    clock, times, nbytes, reruns = 0.0, list[float](), list[int](), list[tuple[float, float]]()
    borders: list[tuple[float, Phase]] = []
    peak_ms = 0.0
    # Updates of single parameters in the middle of a backward are no phase of their own.
    last_pass = max((op.id for op in graph.ops if op.phase is not Phase.OPTIMIZER), default=-1)
    for position, (step, live) in enumerate(zip(schedule.steps, timeline.bytes_at, strict=True)):
        if not isinstance(step, Run):
            continue
        op = graph.ops[step.op]
        if position == timeline.peak_step:
            peak_ms = clock / 1e3
        if step.kind is RunKind.RERUN:
            reruns.append((clock / 1e3, (clock + op.time_us) / 1e3))
        elif (not borders or borders[-1][1] is not op.phase) and (op.phase is not Phase.OPTIMIZER or op.id > last_pass):
            borders.append((clock / 1e3, op.phase))
        times.append(clock / 1e3)
        nbytes.append(live)
        clock += op.time_us
    return Curve(
        label=label,
        ms=(*times, clock / 1e3),
        nbytes=(*nbytes, nbytes[-1] if nbytes else 0),
        rerun_ms=tuple(_joined(reruns)),
        borders=tuple(borders),
        peak_ms=peak_ms,
        peak_bytes=timeline.peak_bytes,
    )


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
            inactive_us=graph.liveness[s.id].inactive_us,
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
        color = SPAN_COLORS["recomputed" if span.recomputed else life.fate.value]
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
    for depth in (3, 2, 1):
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
    runs = [i for i, step in enumerate(schedule.steps) if isinstance(step, Run)]
    size, unit = unit_for(line.peak_bytes)
    with axes_for(path) as axes:
        order = [role for role in ROLE_COLORS if role in series]
        stacked = [[series[role][i] / size for i in (*runs, runs[-1])] for role in order]
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


# -- batch sizes --------------------------------------------------------------------------------------------------

WIDEST = 6.0  # the largest bar to the smallest, as far as one axis shows both with labels that can be read


def panels(rows: Sequence[dict[str, Any]], size: Callable[[dict[str, Any]], float]) -> list[list[dict[str, Any]]]:
    """The rows that share an axis: all of them, or two groups where the largest is more than WIDEST times the smallest.

    These are the measured and the predicted ones; where all are of one kind, those below and above the widest step.
    """
    sizes = [size(row) for row in rows]
    known = [n for n in sizes if n]
    if not known or max(known) <= WIDEST * min(known):
        return [list(rows)]
    kinds = [[row for row in rows if row["measured"] is measured] for measured in (True, False)]
    if all(kinds):
        return kinds
    steps = [after / before if before else 0.0 for before, after in pairwise(sizes)]
    cut = 1 + steps.index(max(steps))
    return [list(rows[:cut]), list(rows[cut:])]


@contextmanager
def _batch_axes(
    path: Path, groups: Sequence[Sequence[dict[str, Any]]], *, title: str, xlabel: str, margin: float
) -> Iterator[list[Any]]:
    """Axes for each group of batches; `margin` inches are for what stands beside the bars."""
    shares = [max(1.5, len(group)) for group in groups]
    with axes_beside(path, shares, width=margin + max(5.5, 1.3 * sum(shares))) as cells:
        cells[0].figure.suptitle(title, fontsize=11)
        cells[0].figure.supxlabel(xlabel, fontsize=10)
        for axes, group in zip(cells, groups, strict=True):
            labels = [f"{row['batch']}" + ("" if row["measured"] else "\n(predicted)") for row in group]
            axes.set_xticks(range(len(group)), labels)
            axes.set_xlim(-0.6, max(1, len(group)) - 0.4)
            if len(groups) > 1:
                kind = "measured" if group[0]["measured"] else "predicted"
                axes.set_title(kind if axes is cells[0] else f"{kind}, another scale", fontsize=9)
        yield cells


def draw_batch_peaks(path: Path, rows: Sequence[dict[str, Any]], *, title: str) -> None:
    """Peak memory against batch size: two bars a batch, without and with a plan, stacked by role."""
    present = {name for row in rows for name in (*row["by_role_eager"], *row["by_role_planned"])}
    roles = [role for role in ROLE_COLORS if role.value in present]
    groups = panels(rows, _eager_bytes)
    xlabel = "batch size (left bar: without a plan, right bar: with)"
    with _batch_axes(path, groups, title=title, xlabel=xlabel, margin=2.5) as cells:
        for axes, group in zip(cells, groups, strict=True):
            _draw_peaks(axes, group, roles)
        handles = _peak_legend(rows, roles)
        cells[-1].legend(handles=handles, frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _eager_bytes(row: dict[str, Any]) -> int:
    return sum(row["by_role_eager"].values())


def _draw_peaks(axes: Any, rows: Sequence[dict[str, Any]], roles: Sequence[Role]) -> None:
    most_bytes = max((_eager_bytes(row) for row in rows), default=1)
    size, unit = unit_for(most_bytes)
    for i, row in enumerate(rows):
        hatch = "" if row["measured"] else "///"
        eager, planned = (_heights(row[key], roles, size) for key in ("by_role_eager", "by_role_planned"))
        _stack(axes, i - 0.2, eager, hatch=hatch, faded=False)
        top = _stack(axes, i + 0.2, planned, hatch=hatch, faded=row["status"] != "fits")
        axes.text(i + 0.2, top + 0.01 * most_bytes / size, reduction_label(row), ha="center", va="bottom", fontsize=9)
    axes.set(ylabel=f"peak memory ({unit})", ylim=(0, 1.15 * most_bytes / size))


def _peak_legend(rows: Sequence[dict[str, Any]], roles: Sequence[Role]) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [Patch(color=ROLE_COLORS[role], label=ROLE_NAMES[role]) for role in reversed(roles)]
    if not all(row["measured"] for row in rows):
        handles.append(Patch(facecolor="white", edgecolor="#555555", hatch="///", label="predicted, not run"))
    if any(row["status"] != "fits" for row in rows):
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


def reduction_label(row: dict[str, Any]) -> str:
    """What is written on the planned bar: by how much it is lower, or that no plan fits."""
    if row["status"] != "fits":
        return str(row["status"]).replace(" ", "\n")  # as wide as the bar
    less = 1 - sum(row["by_role_planned"].values()) / sum(row["by_role_eager"].values())
    return "same" if round(100 * less) == 0 else f"{-less:+.0%}".replace("-", "\N{MINUS SIGN}")


SIDES = ((-0.2, "eager_s", "without a plan", "#8c8c8c"), (0.2, "planned_s", "with a plan", "#2a7f3f"))


def draw_batch_latency(path: Path, rows: Sequence[dict[str, Any]], *, title: str) -> None:
    """Time of a step against batch size: two bars a batch, without and with a plan, and their ratio."""
    groups = panels(rows, lambda row: max(row[key] or 0.0 for _, key, _, _ in SIDES))
    with _batch_axes(path, groups, title=title, xlabel="batch size", margin=1.5) as cells:
        for axes, group in zip(cells, groups, strict=True):
            _draw_latency(axes, group)
        cells[0].legend(frameon=False, loc="upper left")


def _draw_latency(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    highest = max((row[key] for row in rows for _, key, _, _ in SIDES if row[key] is not None), default=1.0)
    for side, key, label, color in SIDES:
        heights = [row[key] or 0.0 for row in rows]
        bars = axes.bar([i + side for i in range(len(rows))], heights, 0.36, color=color, label=label)
        for bar, row in zip(bars, rows, strict=True):
            if not row["measured"]:
                bar.set(hatch="///", edgecolor="white", lw=0)
    for i, row in enumerate(rows):
        axes.text(i + 0.2, (row["planned_s"] or 0.0) + 0.01 * highest, latency_label(row), ha="center", va="bottom",
                  fontsize=9)  # fmt: skip
    axes.set(ylabel="time of a step (s)", ylim=(0, 1.15 * highest))


def latency_label(row: dict[str, Any]) -> str:
    """What is written on the planned bar: its ratio to the plain step, or why there is none."""
    if row["status"] != "fits":
        return str(row["status"]).replace(" ", "\n")  # as wide as the bar
    if row["eager_s"] is None or row["planned_s"] is None:
        return "not timed"
    return f"{row['planned_s'] / row['eager_s']:.2f}x"


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


def unplanned_curve(graph: Graph) -> Curve:
    """Memory over time of the step as it is."""
    schedule = lower(graph, Plan())
    return curve(graph, schedule, simulate(graph, schedule), label="unplanned")


# -- estimates ----------------------------------------------------------------------------------------------------


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
    with _grid(path, len(panels) + 1, title=title) as cells:
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


@contextmanager
def _grid(path: Path, count: int, *, title: str) -> Iterator[Any]:
    """`count` axes in rows of three, blank until used; saved to `path` when done."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, count)
    rows = -(-count // columns)
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(4 * columns, 3.7 * rows), layout="constrained", squeeze=False
        )
        cells = [axes for line in grid for axes in line]
        for axes in cells:
            axes.set_axis_off()
        figure.suptitle(title)
        try:
            yield cells
            figure.savefig(path, dpi=130)
        finally:
            pyplot.close(figure)
