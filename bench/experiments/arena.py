"""`python -m bench arena`: what each idea of memory planning is worth, and what an allocator makes of it.

Four ways to give a step its memory: nothing is ever reused; what is never needed at one time shares addresses; ops
write over inputs that die; and a plan recomputes. Captured without memory, so that the rows are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import strategies
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.results_file import save_rows
from bench.show.axes import axes_beside, unit_for
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.allocator import Allocator, held
from planner.arena import arrange
from planner.blocks import blocks
from planner.errors import NoPlan
from planner.ir import Graph
from planner.schedule import Schedule, unplanned_schedule
from planner.simulator import simulate
from planner.solve import Problem, solve
from planner.units import human_bytes
from profiler.estimating.devices import find_device
from profiler.estimating.roofline import estimated
from profiler.tracing.whole_step import capture_without_memory
from profiler.workload import Workload

MODELS = (
    WorkloadSpec(model="resnet152", batch=8),
    WorkloadSpec(model="bert", batch=16, seq=512),
    WorkloadSpec(model="gpt2", batch=8, seq=512),
    WorkloadSpec(model="densenet121", batch=8),
)
DEVICE = "A100-80"


class Idea(Enum):
    """A way to give the tensors of a step their memory; each takes up the one before it."""

    OWN = "every op its own memory"
    SHARED = "shared where lifetimes do not overlap"
    IN_PLACE = "shared, and ops in place"
    PLANNED = "shared, in place, and planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaRow:
    """One idea on one step. All bytes but `start_bytes` and those reserved are of what the step adds to its start.

    Reserved bytes are what PyTorch's allocator would hold in all, with segments of fixed size and with growing ones.
    """

    graph: str
    idea: Idea
    plan: str  # strategy and budget; "" without a plan
    start_bytes: int
    live_bytes: int
    arena_bytes: int
    reserved_bytes: int | None  # None: nobody runs a step so
    expandable_bytes: int | None
    overhead: float
    ahead_bytes: int | None = None  # reserved where one piece as large as the arena is asked for first

    @property
    def peak_bytes(self) -> int:
        return self.start_bytes + self.live_bytes


def run_arena(specs: Sequence[WorkloadSpec], *, strategy: str, budget: str, out: Path | None) -> list[ArenaRow]:
    """Four rows a model; saved as they come."""
    rows: list[ArenaRow] = []
    for spec in specs:
        with stage(f"{spec.title}: capturing without memory, planning, arranging"):
            rows += arena_rows(_graph(spec), strategy=strategy, budget=budget)
        if out is not None:
            save_rows(out, ARENA, rows)
    ARENA.print("What each idea is worth", rows, caption=CAPTION)
    return rows


CAPTION = (
    "'live': the most that is in use at once, of what the step adds to memory; 'arena': one piece of memory with an "
    "offset for each tensor; 'reserved': what PyTorch's caching allocator would hold for the step and all that is "
    "there before it, by simulation, and its ratio to their peak; 'growing': the same with expandable_segments:True; "
    "'ahead': the same with segments of fixed size, where one piece as large as the arena is asked for before the "
    "first step (reserve='arena')."
)


def _graph(spec: WorkloadSpec) -> Graph:
    device = find_device(DEVICE)

    def make(batch: int) -> Workload:
        return spec.at_batch(batch).make()

    step = capture_without_memory(make, spec.batch_size, name=spec.title, target=device.target)
    return estimated(step, device)


def arena_rows(graph: Graph, *, strategy: str, budget: str) -> list[ArenaRow]:
    """The four ideas on one step, the dearest first."""
    found = solve(Problem.of(graph, budget), strategies.make(strategy))
    if found.schedule is None:
        raise NoPlan(f"{strategy} at {budget} on {graph.name}: {found.reason}")
    apart, together = (unplanned_schedule(graph, in_place=in_place) for in_place in (False, True))
    return [
        _own(graph, apart),
        _row(graph, Idea.SHARED, apart),
        _row(graph, Idea.IN_PLACE, together),
        _row(graph, Idea.PLANNED, found.schedule, plan=f"{strategy}, {budget}: {found.status.value}"),
    ]


def _own(graph: Graph, schedule: Schedule) -> ArenaRow:
    """Every output has its own memory for good; what ops use for themselves is taken in turn."""
    found = blocks(graph, schedule)
    outputs = sum(block.nbytes for block in found if block.tenants)
    nbytes = outputs + max((block.nbytes for block in found if not block.tenants), default=0)
    return ArenaRow(
        graph=graph.name,
        idea=Idea.OWN,
        plan="",
        start_bytes=graph.start_bytes,
        live_bytes=nbytes,
        arena_bytes=nbytes,
        reserved_bytes=None,
        expandable_bytes=None,
        overhead=0.0,
    )


def _row(graph: Graph, idea: Idea, schedule: Schedule, *, plan: str = "") -> ArenaRow:
    timeline = simulate(graph, schedule)
    reserved = {kind: held(graph, schedule, allocator=kind).reserved_bytes for kind in Allocator}
    arena_bytes = arrange(graph, schedule).nbytes
    return ArenaRow(
        graph=graph.name,
        idea=idea,
        plan=plan,
        start_bytes=graph.start_bytes,
        live_bytes=timeline.above_start_bytes,
        arena_bytes=arena_bytes,
        reserved_bytes=reserved[Allocator.CACHING],
        expandable_bytes=reserved[Allocator.EXPANDABLE],
        overhead=timeline.overhead,
        ahead_bytes=held(graph, schedule, ahead_bytes=arena_bytes).reserved_bytes,
    )


COLUMNS = (
    "step",
    "idea",
    "live",
    "arena",
    "arena / live",
    "reserved",
    "/ peak",
    "growing",
    "/ peak",
    "ahead",
    "/ peak",
    "more time",
)


def arena_cells(row: ArenaRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""

    def pair(nbytes: int | None) -> tuple[str, str]:
        return ("-", "-") if nbytes is None else (human_bytes(nbytes), f"{nbytes / row.peak_bytes:.3f}")

    return (
        row.graph,
        f"{row.idea.value} ({row.plan})" if row.plan else row.idea.value,
        human_bytes(row.live_bytes),
        human_bytes(row.arena_bytes),
        f"{row.arena_bytes / max(1, row.live_bytes):.5f}",
        *pair(row.reserved_bytes),
        *pair(row.expandable_bytes),
        *pair(row.ahead_bytes),
        f"{row.overhead:.1%}" if row.plan else "-",
    )


# Shades of one colour, the darkest for the least memory: they are told apart in print, too.
IDEA_COLORS = {Idea.OWN: "#d9d9d9", Idea.SHARED: "#9ecae1", Idea.IN_PLACE: "#4c72b0", Idea.PLANNED: "#1f3864"}


def draw_ideas(path: Path, rows: Sequence[ArenaRow]) -> None:
    """The arena of every idea, one panel a step."""
    graphs = list(dict.fromkeys(row.graph for row in rows))
    names = [idea.value.replace("shared where", "shared where\n").replace(", and", ",\nand") for idea in Idea]
    with axes_beside(path, [1] * len(graphs), width=3.0 + 3.0 * len(graphs), height=3.2) as panels:
        for axes, graph in zip(panels, graphs, strict=True):
            mine = {row.idea: row.arena_bytes for row in rows if row.graph == graph}
            size, unit = unit_for(max(mine.values()))
            for y, (idea, nbytes) in enumerate(mine.items()):
                axes.barh(y, nbytes / size, color=IDEA_COLORS[idea], height=0.7)
                share = f"{nbytes / max(mine.values()):.0%}"
                axes.text(nbytes / size, y, f" {human_bytes(nbytes)} ({share})", va="center", fontsize=9)
            axes.set_yticks(range(len(mine)), names if axes is panels[0] else [""] * len(mine))
            axes.set(title=graph, xlabel=f"memory for what the step makes ({unit})")
            axes.set_xlim(0, 1.55 * max(mine.values()) / size)
            axes.invert_yaxis()


def _draw(results: Results[ArenaRow]) -> list[Path]:
    shown = list(dict.fromkeys(row.graph for row in results.rows))[:2]
    path = results.path.with_suffix(".png")
    draw_ideas(path, [row for row in results.rows if row.graph in shown])
    return [path]


def _below(results: Results[ArenaRow]) -> str:
    return f"\n{CAPTION}\n\n![what each idea is worth]({results.path.stem}.png)\n"


ARENA = Experiment(
    kind="arena", rows=(ArenaRow,), table=line_by_line(COLUMNS, arena_cells), below=_below, draw=_draw
)  # fmt: skip
