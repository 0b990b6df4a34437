"""Capture, measure, solve, replay, prove: the one way from a workload to a planned step, for doors and bench alike."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from planner.allocator import Allocator
from planner.ir import Graph
from planner.schedule import Schedule, unplanned_schedule
from planner.simulator import unplanned
from planner.solve import Problem, Solution
from planner.units import parse_budget, read_budget
from profiler.collectives import sequence_of
from profiler.errors import CaptureError
from profiler.measuring.memory import allocator_of
from profiler.measuring.op_times import Measured
from profiler.measuring.restoring import Touched
from profiler.tracing.eager_ways.assumptions import BrokenAssumption, taken_to_hold
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.guards import Weight
from profiler.tracing.ranks.replicated import unsynchronised, warm_up_needed, wrapper_bytes
from profiler.tracing.ranks.tensor_parallel import is_in_parts
from profiler.tracing.trials.audit import check_against_eager, check_second_trace, eager_ops
from profiler.tracing.trials.interrupts import interrupts_come_between
from profiler.tracing.trials.own_changes import (
    is_left,
    made_once,
    may_decide,
    of_data,
    refuse_carried,
    refuse_deciding,
    refuse_drawn,
    refuse_grown,
    tell_lost,
)
from profiler.tracing.whole_step import TraceAgain, TracedStep, capture, trace_again
from profiler.workload import Workload
from rewriter.agreement import ALONE, Figures, Ranks, agree, largest, slowest, structure
from rewriter.budgets import AUTO, auto_budget, bounds_reserved, margin_bytes
from rewriter.cache import NO_CACHE, Cache
from rewriter.memory_need import lack_of
from rewriter.moving import HostAccess, reserve
from rewriter.other_shapes import scaled
from rewriter.proof import Observation, Verification, compare, observe
from rewriter.provisional import Ready, measure_within
from rewriter.replay import apply

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
    access: HostAccess | None = None
    ranks: Ranks = ALONE
    is_scaled: bool = False  # its times are those of another shape, grown with the sizes
    common: Graph | None = None  # of several ranks: one that no rank's graph exceeds in any size

    @property
    def planned_on(self) -> Graph:
        """The graph that plans are made for, the same on all ranks; what fits it fits them all."""
        return self.common or self.graph

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
        """A step that runs exactly this schedule; HostError where there is no room for what it moves."""
        host = self.access.host if self.access is not None else None
        if host is not None:
            reserve(host, self.graph, schedule)
        return Planned(ready=self, module=apply(self.traced, schedule, host))

    def eager_seen(self, batch: Any, *, steps: int) -> Observation:
        """What the user's own step leaves behind; everything is put back."""
        touched = self.touched(batch).in_eager(self.workload.train_step)
        if warm_up_needed(self.workload.model):  # its first step adds gradients up in another order than all later ones
            with touched.kept():
                for _ in range(2):
                    with touched.watched():
                        self.workload.run(batch)
        return observe(self.workload.run, touched, batch, steps=steps)

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

        One step where the data, or a buffer that it registers, lead another way after it, since that is another form's.
        """
        steps = 1 if self.traced.convention.makes_buffers else steps
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

    @property
    def collectives(self) -> tuple[str, ...]:
        """What it sends to other ranks and waits for, in order."""
        return sequence_of(self.module.graph)

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
    cache: Cache = NO_CACHE,
    ranks: Ranks = ALONE,
    access: HostAccess | None = None,
    known: Sequence[Graph] = (),
) -> ReadyStep:
    """Capture and measure a workload, also one that does not fit in memory unplanned; nothing of it is changed.

    `budgets` are those that plans will be asked for: under the largest of them it is measured where it has to be.
    `audited` holds the capture against a second one and against an eager step: CaptureError where they differ. What
    `cache` has of it is not measured again; nor is a step with the same ops as one of `known`, measured graphs of other
    shapes, which were audited then.
    """
    tell("capturing the step")
    with ranks.together("capturing the step"):
        traced = capture(
            *workload,
            name=name,
            free_gradients=liberties.free_gradients,
            early_updates=liberties.early_updates,
            optimizer_outside=liberties.optimizer_outside,
        )
    agree(ranks, "the captured step", structure(traced.graph), otherwise=SAME_STEP)
    like = scaled(traced, known) if known and ranks.size == 1 else None
    audited = audited and like is None
    tell("tracing it once more" if audited else "looking for what it changes")
    with ranks.together("tracing the step once more"):
        _check_own_changes(workload, traced, liberties, always=audited)
    tell("measuring every op")
    limit = max(budget_bytes(traced.graph, budget, workload.device, in_place=in_place) for budget in budgets)
    with ranks.together("measuring the step"):
        found = like or _measured(traced, workload.batch, limit, cache, ranks, access, show_progress=show_progress)
    if audited and found.as_it_is and not is_in_parts(workload.model):  # whose eager ops are those of whole tensors
        tell("comparing the capture with eager")
        with ranks.together("comparing the capture with eager"):
            check_path(workload, traced)
    ready = ReadyStep(
        workload=workload,
        measured=found.measured,
        as_it_is=found.as_it_is,
        liberties=liberties,
        ranks=ranks,
        access=access,
        is_scaled=like is not None,
    )
    return ready if ranks.size == 1 else _in_common(ready)


SAME_STEP = "give every rank the same model, optimizer, settings and kind of batch (its sizes may differ)"


def _measured(
    traced: TracedStep,
    batch: Any,
    limit_bytes: int,
    cache: Cache,
    ranks: Ranks,
    access: HostAccess | None,
    *,
    show_progress: bool,
) -> Ready:
    """What was measured, now or before; ranks measure together or not at all, since they communicate meanwhile."""
    found = cache.measured(traced)
    kept = all(ranks.gathered("looking for earlier measurements", found is not None))
    if found is None or not kept:
        found = measure_within(
            traced, batch, limit_bytes=limit_bytes, show_progress=show_progress, ranks=ranks, access=access
        )
        cache.keep_measured(traced, found)
    return replace(found, as_it_is=all(ranks.gathered("asking whether all fit unplanned", found.as_it_is)))


def _in_common(ready: ReadyStep) -> ReadyStep:
    """The step with the times of the slowest rank, and the graph that plans are made for on all of them."""
    figures = ready.ranks.gathered("comparing measurements", Figures.of(ready.graph))
    graph = slowest(ready.graph, figures)
    traced = replace(ready.traced, graph=graph)
    return replace(ready, measured=replace(ready.measured, traced=traced), common=largest(graph, figures))


def _check_own_changes(workload: Workload, traced: TracedStep, liberties: Liberties, *, always: bool) -> None:
    """CaptureError where the step does something else a second time, or may later on; a warning of what is lost."""
    convention = traced.convention
    changes, again = convention.guards.changes, None
    refuse_drawn(changes)
    if always or may_decide(convention.guards):
        started = time.perf_counter()
        with interrupts_come_between():
            again = copy_context().run(_traced_again, workload, traced, liberties)
        log.info("traced it once more in %.2f s", time.perf_counter() - started)
        check_second_trace(traced.raw_ops, again.ops, changes, (convention.result.leaves, again.returned))
        refuse_deciding(changes, again.changes)
        left = convention.guards.left
        left.settle(again.left, again.left_later)
        once = [one for one in made_once(changes, again.changes) if not is_left(one, left.found, left.live)]
        convention.guards.watch_also(once, without=left.live.values())
    tell_lost(convention.guards, again)


def _traced_again(workload: Workload, traced: TracedStep, liberties: Liberties) -> TraceAgain:
    """The step traced where the first trace ended; CaptureError where it reads what that one computed."""
    trials = traced.convention.guards.trials
    # Each planned call leaves these as the step does, and another value is another form.
    flags_before = [(module, name, not value) for module, name, value in traced.convention.flags_after]
    with trials.as_after() as stale, patched(flags_before):
        try:
            again = trace_again(workload, optimizer_outside=liberties.optimizer_outside, layout=traced.layout)
        except CaptureError as error:
            refuse_carried(stale.read_of(()) or stale.sentences, because=error)
            raise
        refuse_carried(stale.read_of(again.outside))
    if [op.whole for op in again.ops] != [op.whole for op in traced.raw_ops]:
        refuse_carried(stale.sentences)
    if trials.has_constants:
        later = _check_made_for_good(workload, traced, liberties)
        again = replace(again, changes=later.changes, left_later=later.left)
    return again


def _check_made_for_good(workload: Workload, traced: TracedStep, liberties: Liberties) -> TraceAgain:
    """The step traced with what it made of constants; CaptureError where that does not stay as it is."""
    with traced.convention.guards.trials.as_after(with_constants=True) as stale:
        again = trace_again(workload, optimizer_outside=liberties.optimizer_outside, layout=traced.layout)
        read = stale.read_of(again.outside)
        refuse_grown(stale.read_of(again.written))
    grown = [c for c in again.changes if c.weight is Weight.REMADE and c.read]
    refuse_grown([s for s in read if any(s.startswith(f"{c.path} was") for c in grown)])
    refuse_grown([str(c) for c in grown if c.key is None])
    if of_data(again.ops) != of_data(traced.raw_ops):
        refuse_grown(read or stale.sentences)
    return again


def check_path(workload: Workload, traced: TracedStep) -> None:
    """CaptureError where eager runs other ops than were captured; everything is put back."""
    started = time.perf_counter()
    touched = Touched.by(traced, workload.batch).in_eager(workload.train_step)
    with touched.kept():
        traced.convention.make_state()  # as after a first step: making it is no part of the step
        with unsynchronised(workload.model), touched.watched():
            with_optimizer = not traced.opaque_reason
            eager = eager_ops(
                lambda: copy_context().run(workload.run_once), with_optimizer=with_optimizer, metrics=traced.metrics
            )
    check_against_eager(traced.raw_ops, eager)
    log.info("compared it with eager, op by op, in %.2f s", time.perf_counter() - started)


def budget_bytes(
    graph: Graph, budget: str | int, device: torch.device, *, in_place: bool = True, peak_bytes: int | None = None
) -> int:
    """A budget as bytes of the total peak; a share is one of the unplanned step's, or of `peak_bytes`."""
    if budget == AUTO:
        return auto_budget(graph, device)
    if peak_bytes is None:
        peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
    return parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A budget in bytes, and what of it is kept free for the error of the prediction.

    On a GPU, `allocator` is who hands out its memory; with `reserved`, the budget is for all that it holds.
    `elsewhere_bytes` of what was asked for are taken already, by what the model's wrapper holds for itself.
    """

    nbytes: int
    margin_bytes: int
    allocator: Allocator | None = None
    reserved: bool = False
    elsewhere_bytes: int = 0

    def problem(self, graph: Graph, *, time_limit_s: float, in_place: bool) -> Problem:
        """What a strategy is asked."""
        usable = self.nbytes - self.margin_bytes
        return Problem(
            graph=graph,
            budget_bytes=usable,
            time_limit_s=time_limit_s,
            in_place=in_place,
            allocator=self.allocator,
            most_reserved_bytes=usable if self.reserved and self.allocator is not None else None,
        )


def limit_of(ready: ReadyStep, budget: str | int, *, in_place: bool, keeps_all: bool) -> Limit:
    """The budget with its margin: none where the step fits it as it is.

    `keeps_all` says that running without any recomputation would be an answer.
    """
    graph, device = ready.planned_on, ready.workload.device
    peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
    elsewhere = 0 if budget == AUTO or read_budget(budget)[1] == "%" else wrapper_bytes(ready.workload.model)
    mine = budget_bytes(graph, budget, device, peak_bytes=peak_bytes) - elsewhere
    nbytes = min(ready.ranks.gathered("comparing budgets", mine))  # one plan, within the smallest of them
    limit = Limit(
        nbytes=nbytes,
        margin_bytes=margin_bytes(graph, nbytes),
        allocator=allocator_of(device),
        reserved=bounds_reserved(budget),
        elsewhere_bytes=elsewhere,
    )
    if not keeps_all or not nbytes - limit.margin_bytes < peak_bytes <= nbytes:
        return limit
    # Too close to trust the prediction, and a needless plan would cost time: let the step itself say.
    measured_bytes = graph.start_bytes + _measured_unplanned_bytes(ready, in_place=in_place)
    mine = budget_bytes(graph, budget, device, peak_bytes=max(peak_bytes, measured_bytes)) - elsewhere
    nbytes = min(ready.ranks.gathered("comparing budgets once more", mine))
    margin = 0 if measured_bytes <= nbytes else margin_bytes(graph, nbytes)
    return replace(limit, nbytes=nbytes, margin_bytes=margin)


def _measured_unplanned_bytes(ready: ReadyStep, *, in_place: bool) -> int:
    """What the captured step really adds to memory when it runs unplanned; everything is put back."""
    planned = ready.replayed(unplanned_schedule(ready.graph, in_place=in_place))
    with taken_to_hold():
        steps = 1 if ready.traced.convention.makes_buffers else 2  # a first step may make what later ones find
        mine = planned.seen(ready.workload.batch, steps=steps).peak_bytes
    return max(ready.ranks.gathered("measuring the unplanned step", mine))


DOES_NOT_FIT = "your own step does not fit in memory beside it, so that it was neither audited nor compared"


def why_not_proven(ready: ReadyStep, *, steps: int) -> str:
    """Why there is not the memory to run both versions and to keep what they leave behind; "" where there is."""
    if not ready.as_it_is:
        return DOES_NOT_FIT
    lacking = lack_of(ready.traced, proven_steps=steps)
    return f"to run and compare both versions, {lacking}" if lacking else ""


def proven(solution: Solution, verification: Verification | None, *, why_not: str = "") -> Solution:
    """The solution with a line that says whether it was proven on the user's own step."""
    line = f"unproven: {why_not}" if verification is None else f"proven equal to the bit, steps: {verification.steps}"
    return replace(solution, proof=line)
