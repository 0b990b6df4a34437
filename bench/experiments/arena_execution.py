"""`python -m bench arena --execute`: planned steps run inside of one piece of memory, beside the allocator's.

Ops that can write where they are told (`out=`, in place, copies) do so at the offsets of an arena; what the others make
is left to the allocator, and counted. Both run within the same peak: a step whose arena and rest take more than its
plan says is planned with less until they do not. Memory that is fixed cannot serve what is allocated beside it, so only
blocks that live as briefly as that takes lie in the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

import strategies
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.prepared import prepared
from bench.experiments.results_file import save_rows
from bench.machine.clock import Clock, Spread, gradients_put_back, spread
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.arena import Arena, arranged, most_at_once
from planner.blocks import Block, blocks
from planner.errors import NoPlan
from planner.ir import Graph
from planner.schedule import Run, Schedule
from planner.solve import Problem, Solution, Status, solve
from planner.units import human_bytes
from profiler.ops import aten, fresh, out_form
from rewriter.pipeline import Planned, ReadyStep
from rewriter.proof import Verification
from rewriter.replay import STEP

EXECUTED = (
    WorkloadSpec(model="resnet152", batch=4),
    WorkloadSpec(model="bert", batch=8, seq=128),
    WorkloadSpec(model="gpt2", batch=4, seq=256),
)
PAIRS = 15  # of the two versions in turn
MOST_TRIES = 8  # plans with less and less memory, until arena and rest are within the peak
BRIEF_STEPS = (10**9, 1000, 300, 100, 50, 20, 10, 5, 3, 1, -1)  # how long blocks in the arena may live; none at last
CLOSE = 1.05  # arena and rest, relative to the plan's peak, from which on another plan is asked for
PROVEN_STEPS = 2


# -- a step in an arena ---------------------------------------------------------------------------------------------


class Into:
    """Calls an op with memory that its results are written to, and returns that."""

    def __init__(self, target: Callable[..., Any], memory: tuple[Tensor, ...]) -> None:
        self._target, self._memory = target, memory
        self._outs: dict[str, Tensor] = {}
        if isinstance(target, OpOverload) and target is not aten.clone.default:
            form = out_form(target)
            assert form is not None
            self._target = form
            names = [formal.name for formal in form._schema.arguments if formal.is_out]
            self._outs = dict(zip(names, memory, strict=True))
        self.__name__ = self.__qualname__ = f"into_arena_{str(target).replace('.', '_')}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._outs:
            return self._target(*args, **kwargs, **self._outs)
        if self._target is fresh:  # op, size, strides, type and device, which the memory has; then the op's own
            return args[0](self._memory[0], *args[5:], **kwargs)
        return self._memory[0].copy_(args[0])


@dataclass(frozen=True, kw_only=True)
class InArena:
    """A planned step whose ops write into an arena where they can. The arena is held as long as the step is."""

    planned: Planned
    arena: Arena
    runs_inside: int  # ops that write where they are told
    runs: int
    outside_bytes: int  # the most that the allocator has to give beside the arena

    @property
    def bytes_inside(self) -> int:
        return sum(block.nbytes for block in self.arena.blocks)

    @property
    def total_bytes(self) -> int:
        return self.arena.nbytes + self.outside_bytes


def in_arena(ready: ReadyStep, schedule: Schedule, *, close: float = CLOSE) -> InArena:
    """The replayed schedule, with its ops in an arena where they have a form that writes there."""
    planned = ready.replayed(schedule)
    nodes = {node.meta[STEP]: node for node in planned.module.graph.nodes if STEP in node.meta}
    arena, outside_bytes = arena_of(ready.graph, schedule, nodes, close=close)
    memory = torch.empty(arena.nbytes, dtype=torch.uint8, device=ready.workload.device)
    by_step = _offsets_by_step(arena)
    for position, offsets in by_step.items():
        node = nodes[position]
        views = tuple(_view(memory, offset, like) for offset, like in zip(offsets, _made(node), strict=True))
        node.target = Into(node.target, views)
    planned.module.recompile()
    return InArena(
        planned=planned,
        arena=arena,
        runs_inside=len(by_step) + sum(len(block.tenants) - 1 for block in arena.blocks),
        runs=sum(isinstance(step, Run) for step in schedule.steps),
        outside_bytes=outside_bytes,
    )


def arena_of(graph: Graph, schedule: Schedule, nodes: Mapping[int, fx.Node], *, close: float) -> tuple[Arena, int]:
    """An arena of the blocks that live briefly enough, and the most that is allocated beside it.

    In it lie blocks of ops that have a form for it, and that the step lets go of by itself: as many as stay close to
    the schedule's peak, together with the rest. None always do.
    """
    whole = blocks(graph, schedule)
    able = _able(graph, schedule, nodes, whole)
    for steps in BRIEF_STEPS:
        inside = [block for lives, group in able if lives <= steps for block in group]
        arena, beside = arranged(inside), _most(_without(whole, inside))
        if arena.nbytes + beside <= close * _most(whole):
            break
    return arena, beside


def _without(whole: Sequence[Block], some: Sequence[Block]) -> list[Block]:
    left_out = set(some)
    return [block for block in whole if block not in left_out]


def _able(
    graph: Graph, schedule: Schedule, nodes: Mapping[int, fx.Node], whole: Sequence[Block]
) -> list[tuple[int, list[Block]]]:
    """The blocks of every op that can be told where to write, with the steps that the longest of them lives."""
    made: dict[int, list[Block]] = {}
    for block in whole:
        if block.tenants and not any(storage in graph.held_storages for storage, _ in block.tenants):
            made.setdefault(block.first_step, []).append(block)
    able = [step for step in made if _can_be_told(nodes.get(step))]
    whole_ops = [made[step] for step in able if {b.tenants[0][0] for b in made[step]} == _makes(schedule, graph, step)]
    return [(max(block.last_step - block.first_step for block in group), group) for group in whole_ops]


def _makes(schedule: Schedule, graph: Graph, step: int) -> set[int]:
    """All that the op at a step makes: it is told where to put everything, or nothing."""
    run = schedule.steps[step]
    return set(graph.makes[run.op]) if isinstance(run, Run) else set()


def _can_be_told(node: fx.Node | None) -> bool:
    target = None if node is None else node.target
    if target is fresh or target is aten.clone.default:
        return True
    return isinstance(target, OpOverload) and out_form(target) is not None


def _made(node: fx.Node) -> tuple[Tensor, ...]:
    made = node.meta["val"]
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """The memory at an offset with the shape and strides that the op's own result would have."""
    nbytes = like.untyped_storage().nbytes()
    return memory[offset : offset + nbytes].view(like.dtype).as_strided(like.shape, like.stride())


def _offsets_by_step(arena: Arena) -> dict[int, list[int]]:
    """Where the results of each op lie, in the order of its results."""
    found: dict[int, list[int]] = {}
    for block, offset in zip(arena.blocks, arena.offsets, strict=True):
        found.setdefault(block.first_step, []).append(offset)
    return found


def _most(found: Sequence[Block]) -> int:
    first, last, sizes = (
        np.array([getattr(block, name) for block in found], dtype=np.int64)
        for name in ("first_step", "last_step", "nbytes")
    )
    return most_at_once(first, last, sizes)


# -- the experiment -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedRow:
    """One plan under the allocator, and one within the same peak in an arena. Bytes are above the step's start."""

    graph: str
    plan: str
    allocator_peak_bytes: int  # measured
    arena_peak_bytes: int  # the arena, and the peak measured beside it
    arena_bytes: int
    inside: float  # of the bytes that ops make: what lies in the arena
    runs_inside: int
    runs: int
    allocator_overhead: float  # of the plan, by op times
    arena_overhead: float
    time: Spread  # of a step in the arena, relative to one under the allocator in the same pair
    exact: bool
    pairs: int


def run_executed(specs: Sequence[WorkloadSpec], *, strategy: str, budget: str, out: Path | None) -> list[ExecutedRow]:
    """One row a model; saved as they come."""
    rows: list[ExecutedRow] = []
    for spec in specs:
        with stage(f"{spec.title}: measuring, planning, running in turn"):
            rows.append(executed_row(prepared(spec, [budget]), strategy=strategy, budget=budget))
        if out is not None:
            save_rows(out, ARENA_EXECUTION, rows)
    ARENA_EXECUTION.print("Planned steps in an arena", rows, caption=CAPTION)
    return rows


CAPTION = (
    "Both within one peak: 'allocator' and 'arena' are what the planned step adds to memory, measured, the arena and "
    "what is allocated beside it together. 'inside': the share of the bytes that ops make, and the ops that write "
    "where they are told. 'more time': of the two plans, by op times. 'time': a step in the arena relative to one "
    "under the allocator, medians and quartiles of pairs in turn. 'equal': all that both leave is eager's to the bit."
)


def executed_row(ready: ReadyStep, *, strategy: str, budget: str, pairs: int = PAIRS) -> ExecutedRow:
    """A plan under the allocator beside one in an arena within the same peak, proven and timed."""
    batch = ready.workload.batch
    expected = ready.eager_seen(batch, steps=PROVEN_STEPS)
    found = _solved(Problem.of(ready.graph, budget), strategy)
    plain = ready.replayed(_schedule(found))
    seen = ready.proof_against(expected, plain, found, batch)
    fitted, inside = _within(ready, found, strategy)
    seen_inside = ready.proof_against(expected, inside.planned, fitted, batch)
    ratios = _ratios(ready, plain, inside.planned, pairs)
    return replace(_row(found, fitted, seen, seen_inside, inside, ratios), pairs=pairs)


def _row(
    found: Solution, fitted: Solution, seen: Verification, seen_inside: Verification, inside: InArena, times: Spread
) -> ExecutedRow:
    graph = found.problem.graph
    made = sum(block.nbytes for block in blocks(graph, _schedule(fitted)) if block.tenants)
    return ExecutedRow(
        graph=graph.name,
        plan=f"{found.strategy}, {human_bytes(found.problem.budget_bytes)}",
        allocator_peak_bytes=seen.measured_peak_bytes,
        arena_peak_bytes=inside.arena.nbytes + seen_inside.measured_peak_bytes,
        arena_bytes=inside.arena.nbytes,
        inside=inside.bytes_inside / max(1, made),
        runs_inside=inside.runs_inside,
        runs=inside.runs,
        allocator_overhead=found.overhead or 0.0,
        arena_overhead=fitted.overhead or 0.0,
        time=times,
        exact=seen.exact and seen_inside.exact,
        pairs=PAIRS,
    )


def _schedule(solution: Solution) -> Schedule:
    assert solution.schedule is not None
    return solution.schedule


def _solved(problem: Problem, strategy: str) -> Solution:
    found = solve(problem, strategies.make(strategy), label=strategy)
    if found.schedule is None:
        raise NoPlan(f"{strategy} on {problem.graph.name}: {found.reason}")
    return found


def _within(ready: ReadyStep, found: Solution, strategy: str) -> tuple[Solution, InArena]:
    """A plan whose arena and rest stay within the peak of `found`, which itself has one, if a small one."""
    assert found.timeline is not None
    most, tried = found.timeline.above_start_bytes, found
    for _ in range(MOST_TRIES):
        inside = in_arena(ready, _schedule(tried))
        over = inside.total_bytes - most
        if over <= 0:
            return tried, inside
        assert tried.timeline is not None
        less = replace(found.problem, budget_bytes=min(tried.problem.budget_bytes, tried.timeline.peak_bytes) - over)
        tried = _solved(less, strategy)
        if tried.status is not Status.FITS:
            break
    return found, in_arena(ready, _schedule(found), close=1.0)


def _ratios(ready: ReadyStep, plain: Planned, inside: Planned, pairs: int) -> Spread:
    """Seconds in the arena over seconds under the allocator, pair by pair, each first in turn."""
    batch, clock = ready.workload.batch, Clock(ready.workload.device)
    put_back = gradients_put_back(ready.traced)

    def seconds(planned: Planned) -> float:
        put_back()
        return clock.seconds(partial(planned, batch))

    for version in (plain, inside):
        seconds(version)  # the first of each makes what later ones find
    ratios = []
    for i in range(pairs):
        if i % 2:
            own = seconds(inside)
            ratios.append(own / seconds(plain))
        else:
            theirs = seconds(plain)
            ratios.append(seconds(inside) / theirs)
    found = spread(ratios)
    assert found is not None
    return found


COLUMNS = ("step", "plan", "allocator", "arena", "of that fixed", "inside", "more time", "time", "equal")


def executed_cells(row: ExecutedRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    return (
        row.graph,
        row.plan,
        human_bytes(row.allocator_peak_bytes),
        human_bytes(row.arena_peak_bytes),
        human_bytes(row.arena_bytes),
        f"{row.inside:.0%}, {row.runs_inside} of {row.runs} ops",
        f"{row.allocator_overhead:.1%}, {row.arena_overhead:.1%}",
        f"{row.time.median:.3f}x ({row.time.low:.3f}-{row.time.high:.3f})",
        "yes" if row.exact else "NO",
    )


def _below(results: Results[ExecutedRow]) -> str:
    return f"\n{CAPTION}\n"


ARENA_EXECUTION = Experiment(
    kind="arena_execution", rows=(ExecutedRow,), table=line_by_line(COLUMNS, executed_cells), below=_below
)
