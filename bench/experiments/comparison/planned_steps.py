"""Model x strategy x budget to rows: captured, planned, rewritten, proven exact, timed against eager in turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import strategies
from bench.experiments.comparison.rows import PlannedRow
from bench.experiments.host_links import label, moving
from bench.experiments.prepared import prepared
from bench.machine.clock import Clock, Taken, gradients_put_back, spread
from bench.show.terminal import progress, say
from bench.workloads.spec import WorkloadSpec
from planner.simulator import unplanned
from planner.solve import Problem, Solution, Status, solve_if_needed
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory, guarded
from rewriter.memory_need import lack_of
from rewriter.moving import HostAccess
from rewriter.pipeline import Planned, ReadyStep
from rewriter.proof import Observation, Verification

PROVEN_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of one model, and the solutions behind them, for figures."""

    ready: ReadyStep
    rows: list[PlannedRow]
    solutions: list[Solution]
    why_not_compared: str  # with eager; "" where it was


@dataclass(kw_only=True)
class _Candidate:
    """One solution on its way to a row."""

    spec: str
    budget: str
    solution: Solution
    planned: Planned | None = None
    apply_s: float | None = None
    proof: Verification | None = None
    added_bytes: int | None = None  # to memory, as measured
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # seconds to eager's in the same round
    cpu_ratios: list[float] = field(default_factory=list)  # processor time, likewise
    stalls: list[float] = field(default_factory=list)  # seconds of each step that waited for copies
    failure: str = ""  # why it was not run, proven or timed


def run_comparison(
    spec: WorkloadSpec,
    strategy_specs: Sequence[str],
    budgets: Sequence[str],
    *,
    pairs: int,
    time_limit_s: float,
    access: HostAccess | None = None,
) -> Comparison:
    """Everything about one model; progress is shown throughout.

    A step that does not fit in memory as it is is planned and run all the same, without eager beside it. A planned
    step that runs out of memory is a row that says so. With `access`, strategies that can use it also plan with moves
    to the host.
    """
    chosen = [(name, strategies.make(name)) for name in strategy_specs]  # bad names fail before the work starts
    with progress() as bar:
        task = bar.add_task("making the model", total=4 + 2 * len(chosen) * len(budgets))
        say(f"{spec.title}: making the model")

        def tell(text: str, *, advance: int = 1) -> None:
            bar.update(task, advance=advance, description=text)
            say(text)

        ready = replace(prepared(spec, budgets, tell=tell), access=access)
        problems = {budget: Problem.of(ready.graph, budget, time_limit_s=time_limit_s) for budget in budgets}
        tell("eager, for comparison")
        why_not = _why_not_compared(ready)
        expected = None if why_not else _eager(spec, ready)
        candidates = []
        for budget in budgets:
            for name, strategy in chosen:
                tell(f"planning {name} at {budget}")
                solution = solve_if_needed(problems[budget], strategy, label=name)
                candidates.append(_Candidate(spec=name, budget=budget, solution=solution))
            if access is not None:
                candidates += _moving_candidates(strategy_specs, budget, access.offered_in(problems[budget]))
        for found in candidates:
            tell(f"rewriting and proving {found.spec} at {found.budget}")
            _try(found, ready, expected)
        tell(f"timing, rounds of eager and planned steps: {pairs}", advance=0)
        eager_s = _time_or_say_why(ready, candidates, pairs, eager=expected is not None)
    rows = [_row(spec, ready, found, expected, eager_s, why_not) for found in candidates]
    solutions = [found.solution for found in candidates]
    return Comparison(ready=ready, rows=rows, solutions=solutions, why_not_compared=why_not)


def _moving_candidates(specs: Sequence[str], budget: str, problem: Problem) -> list[_Candidate]:
    """The strategies that may move tensors to the host, planned with the link."""
    assert problem.host_link is not None
    found = []
    for spec in moving(specs):
        name = label(spec, problem.host_link)
        solution = solve_if_needed(problem, strategies.make(spec), label=name)
        found.append(_Candidate(spec=name, budget=budget, solution=solution))
    return found


def _why_not_compared(ready: ReadyStep) -> str:
    if not ready.as_it_is:
        return "not compared with eager, which does not fit in memory"
    lack = lack_of(ready.traced, proven_steps=PROVEN_STEPS)
    return f"not compared with eager: {lack}" if lack else ""


def _eager(spec: WorkloadSpec, ready: ReadyStep) -> Observation:
    batch = ready.workload.batch
    return guarded(f"running {spec.title} without a plan", lambda: ready.eager_seen(batch, steps=PROVEN_STEPS))


def _try(found: _Candidate, ready: ReadyStep, expected: Observation | None) -> None:
    """Rewrite the step and run it, beside eager where there is one; a plan over budget is not run."""
    if found.solution.status is not Status.FITS:
        return
    try:
        _rewrite_and_prove(found, ready, expected)
    except OutOfMemory as answer:
        found.failure = str(answer)


def _rewrite_and_prove(found: _Candidate, ready: ReadyStep, expected: Observation | None) -> None:
    schedule, timeline = found.solution.schedule, found.solution.timeline
    assert schedule is not None
    assert timeline is not None
    started = time.perf_counter()
    planned = ready.replayed(schedule)
    found.apply_s = time.perf_counter() - started
    batch, solution = ready.workload.batch, found.solution
    if expected is not None:
        found.proof = guarded(
            "proving the planned step", lambda: ready.proof_against(expected, planned, solution, batch)
        )
        found.added_bytes = found.proof.measured_peak_bytes
    elif lack := lack_of(ready.traced, proven_steps=PROVEN_STEPS, added_bytes=timeline.above_start_bytes):
        found.failure = f"not run: {lack}"
        return
    else:
        found.added_bytes = guarded(
            "running the planned step", lambda: planned.seen(batch, steps=PROVEN_STEPS).peak_bytes
        )
    found.planned = planned


def _time_or_say_why(ready: ReadyStep, candidates: Sequence[_Candidate], pairs: int, *, eager: bool) -> float | None:
    """`_time`; if memory runs out, None, and every candidate says so: what was proven so far is kept."""
    try:
        return guarded("timing", lambda: _time(ready, candidates, pairs, eager=eager))
    except OutOfMemory as answer:
        for found in candidates:
            found.failure = found.failure or str(answer)
            found.ratios.clear()  # a median of fewer rounds than were asked for is none
            found.cpu_ratios.clear()
            found.seconds.clear()
        return None


def _time(ready: ReadyStep, candidates: Sequence[_Candidate], pairs: int, *, eager: bool) -> float | None:
    """Time eager and every planned step in turn; notes each one's seconds, returns eager's median."""
    clock, put_back, batch = Clock(ready.workload.device), gradients_put_back(ready.traced), ready.workload.batch

    def taken(call: Callable[[], object]) -> Taken:
        put_back()
        return clock.taken(call)

    plain: list[Taken] = []
    gc.collect()
    for _ in range(pairs):
        if eager:
            plain.append(taken(ready.workload.run_once))
        for found in candidates:
            if (planned := found.planned) is not None:
                waited = waited_s(ready)
                took = taken(lambda planned=planned: planned(batch))  # type: ignore[misc]
                found.stalls.append(waited_s(ready) - waited)
                found.seconds.append(took.wall_s)
                if eager:
                    ratio = took.over(plain[-1])
                    found.ratios.append(ratio.wall_s)
                    found.cpu_ratios.append(ratio.cpu_s)
    middle = spread([took.wall_s for took in plain])
    return None if middle is None else middle.median


def waited_s(ready: ReadyStep) -> float:
    """How long steps have waited for copies so far, where the host counts it."""
    return getattr(ready.access.host, "waited_s", 0.0) if ready.access is not None else 0.0


def _row(
    spec: WorkloadSpec,
    ready: ReadyStep,
    found: _Candidate,
    expected: Observation | None,
    eager_s: float | None,
    why_not: str,
) -> PlannedRow:
    solution, timeline, start = found.solution, found.solution.timeline, ready.graph.start_bytes
    ratios, seconds, proof = spread(found.ratios), spread(found.seconds), found.proof
    eager_peak = unplanned(ready.graph).peak_bytes if expected is None else start + expected.peak_bytes
    peak = None if found.added_bytes is None else start + found.added_bytes
    predicted = timeline.peak_bytes if timeline else None
    return PlannedRow(
        model=spec.title,
        free_gradients=spec.free_gradients,
        early_updates=spec.early_updates,
        strategy=found.spec,
        budget=found.budget,
        status=solution.status,
        budget_bytes=solution.problem.budget_bytes,
        start_bytes=start,
        eager_peak_bytes=eager_peak,
        predicted_peak_bytes=predicted,
        measured_peak_bytes=peak,
        predicted_overhead=timeline.overhead if timeline else None,
        measured_ratio=ratios.median if ratios else None,
        ratio_low=ratios.low if ratios else None,
        ratio_high=ratios.high if ratios else None,
        eager_s=eager_s,
        dropped=len(solution.dropped),
        reruns=timeline.reruns if timeline else 0,
        gap=solution.gap,
        plan_s=solution.solve_s,
        apply_s=found.apply_s,
        exact=proof.exact if proof else None,
        note=_note(found, peak, why_not),
        step_share=None if peak is None else (peak - start) / (eager_peak - start),
        prediction_error=_off_by(found.added_bytes, timeline.above_start_bytes if timeline else None),
        planned_s=ratios.median * eager_s if ratios and eager_s else seconds.median if seconds else None,
        moved_bytes=timeline.moved_bytes if timeline else None,
        predicted_stall_s=timeline.stall_us / 1e6 if timeline else None,
        measured_stall_s=statistics.median(found.stalls) if found.stalls else None,
        cpu_ratio=statistics.median(found.cpu_ratios) if found.cpu_ratios else None,
    )


def _off_by(measured_bytes: int | None, predicted_bytes: int | None) -> float | None:
    """Measured less predicted, relative to measured."""
    if measured_bytes is None or predicted_bytes is None:
        return None
    return (measured_bytes - predicted_bytes) / measured_bytes if measured_bytes else 0.0


def _note(found: _Candidate, peak_bytes: int | None, why_not: str) -> str:
    """What a reader of the row has to know: a failure, a difference, a peak over the budget, else the judge's words."""
    if found.failure:
        return found.failure
    if found.proof is not None and not found.proof.exact:
        return found.proof.first_mismatch
    over = (peak_bytes or 0) - found.solution.problem.budget_bytes
    if over > 0:
        return f"measured {human_bytes(over)} over the budget"
    return why_not if why_not and found.planned is not None else found.solution.reason
