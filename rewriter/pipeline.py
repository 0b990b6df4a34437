"""Capture, measure, solve, replay, prove: the one way from a workload to a planned step, for doors and bench alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from planner.ir import Graph
from planner.schedule import Schedule, unplanned_schedule
from planner.simulator import unplanned
from planner.solve import Problem, Solution
from planner.units import parse_budget
from profiler.measuring.op_times import Measured
from profiler.measuring.restoring import Touched
from profiler.tracing.assumptions import BrokenAssumption, taken_to_hold
from profiler.tracing.audit import check_second_trace, difference_from_eager, eager_ops
from profiler.tracing.whole_step import TracedStep, capture, traced_ops
from profiler.workload import Workload
from rewriter.budgets import AUTO, auto_budget, margin_bytes
from rewriter.proof import Observation, Verification, compare, observe
from rewriter.replay import apply
from rewriter.tight_memory import measure_within

log = logging.getLogger("recompute_planner")

Tell = Callable[[str], None]


def _say_nothing(_: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Liberties:
    """What a planned step may do that the plain one does not."""

    free_gradients: bool = False  # it ends with every `.grad` at None
    early_updates: bool = False  # it updates each parameter once its gradient is complete
    optimizer_outside: bool = False  # the optimizer runs as itself, so that its numbers may change between steps


NO_LIBERTIES = Liberties()


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A captured and measured step: plans are asked of it, replayed and proven.

    `as_it_is` says that it fits in memory unplanned, so that the user's own step can be run beside the planned one.
    """

    workload: Workload
    measured: Measured
    as_it_is: bool
    liberties: Liberties = NO_LIBERTIES
    other_path: str = ""  # where eager runs other ops than the capture, said in a sentence

    @property
    def traced(self) -> TracedStep:
        return self.measured.traced

    @property
    def graph(self) -> Graph:
        return self.measured.graph

    def touched(self, batch: Any) -> Touched:
        """What the step writes to when it is called with `batch`."""
        return Touched.by(self.traced, batch)

    @cached_property
    def unplanned(self) -> Planned:
        """The captured step, replayed without any recomputation."""
        return self.replayed(unplanned_schedule(self.graph))

    def replayed(self, schedule: Schedule) -> Planned:
        """A step that runs exactly this schedule."""
        return Planned(ready=self, module=apply(self.traced, schedule))

    def eager_seen(self, batch: Any, *, steps: int) -> Observation:
        """What the user's own step leaves behind; everything is put back."""
        return observe(self.workload.run, self.touched(batch), batch, steps=steps)

    def proof_against(self, expected: Observation, planned: Planned, solution: Solution, batch: Any) -> Verification:
        """What a planned step leaves behind, compared with what the user's own did."""
        assert solution.timeline is not None
        return compare(
            expected,
            planned.seen(batch, steps=expected.steps),
            predicted_peak_bytes=solution.timeline.above_start_bytes,
            compare_gradients=not self.liberties.free_gradients,
        )

    def proof(self, planned: Planned, solution: Solution, batch: Any, *, steps: int) -> Verification:
        """Both versions for a few steps from the same state, compared to the bit; everything is put back.

        One step where the data lead another way after it, since that is another form's.
        """
        try:
            return self.proof_against(self.eager_seen(batch, steps=steps), planned, solution, batch)
        except BrokenAssumption:
            if steps == 1:
                raise
        return self.proof(planned, solution, batch, steps=1)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A replayed schedule that runs on the user's live objects."""

    ready: ReadyStep
    module: fx.GraphModule

    def __call__(self, batch: Any) -> Any:
        """One step; CaptureError where the step is not the captured one any more."""
        return self.ready.traced.convention.call(self.module, batch)

    def run(self, batch: Any) -> Any:
        """One step without the check, for who has just checked."""
        return self.ready.traced.convention.run(self.module, batch)

    def seen(self, batch: Any, *, steps: int) -> Observation:
        """What it leaves behind, and its measured peak; everything is put back."""
        convention = self.ready.traced.convention
        return observe(self, self.ready.touched(batch), batch, steps=steps, begin=convention.make_state)


def prepare(
    workload: Workload,
    budgets: Sequence[str | int],
    *,
    name: str = "",
    liberties: Liberties = NO_LIBERTIES,
    in_place: bool = True,
    audited: bool = False,
    show_progress: bool = False,
    tell: Tell = _say_nothing,
) -> ReadyStep:
    """Capture and measure a workload, also one that does not fit in memory unplanned; nothing of it is changed.

    `budgets` are those that plans will be asked for: under the largest of them it is measured where it has to be.
    `audited` holds the capture against a second one (CaptureError where they differ) and against an eager step.
    """
    tell("capturing the step")
    traced = capture(
        *workload,
        name=name,
        free_gradients=liberties.free_gradients,
        early_updates=liberties.early_updates,
        optimizer_outside=liberties.optimizer_outside,
    )
    tell("measuring every op")
    limit = max(budget_bytes(traced.graph, budget, workload.device, in_place=in_place) for budget in budgets)
    other_path = ""
    found = measure_within(traced, workload.batch, limit_bytes=limit, show_progress=show_progress)
    if audited:
        tell("comparing the capture with eager")
        other_path = _audit(workload, traced, liberties, fits=found.as_it_is)
        if other_path:
            log.warning("%s", other_path)
    return ReadyStep(
        workload=workload,
        measured=found.measured,
        as_it_is=found.as_it_is,
        liberties=liberties,
        other_path=other_path,
    )


def _audit(workload: Workload, traced: TracedStep, liberties: Liberties, *, fits: bool) -> str:
    """CaptureError where the step does something else a second time; a sentence where eager runs other ops.

    Where an eager step does not fit in memory, only the former is asked. Everything is put back.
    """
    again = traced_ops(workload, optimizer_outside=liberties.optimizer_outside)
    check_second_trace(traced.raw_ops, again, traced.convention.guards.changes)
    if not fits:
        return ""
    with Touched.by(traced, workload.batch).kept():
        traced.convention.make_state()  # as after a first step: making it is no part of the step
        eager = eager_ops(workload.run_once, with_optimizer=not traced.opaque_reason)
    return difference_from_eager(traced.raw_ops, eager)


def budget_bytes(
    graph: Graph, budget: str | int, device: torch.device, *, in_place: bool = True, peak_bytes: int | None = None
) -> int:
    """A budget as bytes of the total peak; a share is one of the unplanned step's, or of `peak_bytes`."""
    if budget == AUTO:
        return auto_budget(graph, device, torch.cuda)
    if peak_bytes is None:
        peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
    return parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A budget in bytes, and what of it is kept free for the error of the prediction."""

    nbytes: int
    margin_bytes: int

    def problem(self, graph: Graph, *, time_limit_s: float, in_place: bool) -> Problem:
        """What a strategy is asked."""
        usable = self.nbytes - self.margin_bytes
        return Problem(graph=graph, budget_bytes=usable, time_limit_s=time_limit_s, in_place=in_place)


def limit_of(ready: ReadyStep, budget: str | int, *, in_place: bool, keeps_all: bool) -> Limit:
    """The budget with its margin: none where the step fits it as it is.

    `keeps_all` says that running without any recomputation would be an answer.
    """
    graph, device = ready.graph, ready.workload.device
    peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
    limit = budget_bytes(graph, budget, device, peak_bytes=peak_bytes)
    margin = margin_bytes(graph, limit)
    if not keeps_all or not limit - margin < peak_bytes <= limit:
        return Limit(nbytes=limit, margin_bytes=margin)
    # Too close to trust the prediction, and a needless plan would cost time: let the step itself say.
    measured_bytes = graph.start_bytes + _measured_unplanned_bytes(ready, in_place=in_place)
    limit = budget_bytes(graph, budget, device, peak_bytes=max(peak_bytes, measured_bytes))
    return Limit(nbytes=limit, margin_bytes=0 if measured_bytes <= limit else margin_bytes(graph, limit))


def _measured_unplanned_bytes(ready: ReadyStep, *, in_place: bool) -> int:
    """What the captured step really adds to memory when it runs unplanned; everything is put back."""
    planned = ready.replayed(unplanned_schedule(ready.graph, in_place=in_place))
    with taken_to_hold():
        return planned.seen(ready.workload.batch, steps=2).peak_bytes  # a first step may make what later ones find


def proven(solution: Solution, verification: Verification | None, *, why_not: str = "") -> Solution:
    """The solution with a line that says whether it was proven on the user's own step."""
    line = f"unproven: {why_not}" if verification is None else f"proven equal to the bit, steps: {verification.steps}"
    return replace(solution, proof=line)
