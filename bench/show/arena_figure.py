"""An arena, drawn: where in one piece of memory each tensor lies, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.show.axes import ROLE_COLORS, ROLE_NAMES, axes_beside, unit_for
from bench.show.memory_figures import Curve, curve, shade_phases
from planner.arena import Arena, arrange
from planner.ir import Graph, Role
from planner.schedule import Schedule
from planner.simulator import simulate
from planner.units import human_bytes
from planner.walk import walk

LEAST_SHOWN = 0.003  # of the arena: what is thinner cannot be told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A storage, or what one op uses for itself, as a rectangle of time and address."""

    start_ms: float
    end_ms: float
    offset: int
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One arena to draw, with the phases of its step behind it."""

    label: str
    boxes: tuple[Box, ...]
    nbytes: int
    line: Curve


def picture(graph: Graph, schedule: Schedule, *, label: str) -> Picture:
    """The numbers of one panel."""
    arena = arrange(graph, schedule)
    return Picture(
        label=label,
        boxes=tuple(_boxes(graph, schedule, arena)),
        nbytes=arena.nbytes,
        line=curve(graph, schedule, simulate(graph, schedule), label=label),
    )


def _boxes(graph: Graph, schedule: Schedule, arena: Arena) -> list[Box]:
    starts = [event.start_us / 1e3 for event in walk(graph, schedule)]
    starts.append(simulate(graph, schedule).time_us / 1e3)
    boxes: list[Box] = []
    for block, offset in zip(arena.blocks, arena.offsets, strict=True):
        tenants = [(graph.storages[s].role, step) for s, step in block.tenants] or [(Role.TEMP, block.first_step)]
        ends = [*(step for _, step in tenants[1:]), block.last_step + 1]
        for (role, step), until in zip(tenants, ends, strict=True):
            span = {"start_ms": starts[step], "end_ms": starts[until]}
            boxes.append(Box(**span, offset=offset, nbytes=block.nbytes, role=role))
    return boxes


def draw_arena(path: Path, pictures: Sequence[Picture], *, title: str) -> None:
    """Address against time, one panel an arena, all on one scale."""
    highest = max(p.nbytes for p in pictures)
    size, unit = unit_for(highest)
    with axes_beside(path, [1] * len(pictures), width=6.2 * len(pictures), height=5.0) as panels:
        for axes, shown in zip(panels, pictures, strict=True):
            shade_phases(axes, shown.line, shown.line.ms[-1])
            _draw_boxes(axes, shown.boxes, size, highest)
            axes.axhline(shown.nbytes / size, color="#aa2222", lw=1, ls="--")
            axes.text(0.01, 1.005 * shown.nbytes / size, human_bytes(shown.nbytes), color="#aa2222", fontsize=10,
                      va="bottom", transform=axes.get_yaxis_transform())  # fmt: skip
            axes.set(xlabel="time in the step (ms)", xlim=(0, shown.line.ms[-1]), ylim=(0, 1.1 * highest / size))
            axes.set_title(shown.label)
        panels[0].set_ylabel(f"address in the arena ({unit})")
        panels[0].figure.suptitle(title)
        _add_legend(panels[-1], pictures)


def _draw_boxes(axes: Any, boxes: Sequence[Box], size: int, highest: int) -> None:
    from matplotlib.collections import PolyCollection

    for role, color in ROLE_COLORS.items():
        mine = [box for box in boxes if box.role is role]
        corners = [
            [(b.start_ms, b.offset / size), (b.end_ms, b.offset / size), (b.end_ms, (b.offset + b.nbytes) / size),
             (b.start_ms, (b.offset + b.nbytes) / size)]
            for b in mine
        ]  # fmt: skip
        # A white edge would hide what is as thin as the edge.
        edges = ["white" if b.nbytes > LEAST_SHOWN * highest else color for b in mine]
        axes.add_collection(PolyCollection(corners, facecolors=color, edgecolors=edges, linewidths=0.25))


def _add_legend(axes: Any, pictures: Sequence[Picture]) -> None:
    from matplotlib.patches import Patch

    seen = {b.role for shown in pictures for b in shown.boxes if b.nbytes > LEAST_SHOWN * shown.nbytes}
    handles = [Patch(color=color, label=ROLE_NAMES[role]) for role, color in ROLE_COLORS.items() if role in seen]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=10)
