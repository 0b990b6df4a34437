"""What a step is made of, drawn: its peak by role, its largest activations, its time by kind of op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.show.axes import ROLE_COLORS, ROLE_NAMES, axes_for, unit_for
from planner.analysis import liveness
from planner.ir import Graph, Phase, Role
from planner.simulator import Timeline
from planner.units import human_bytes


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
