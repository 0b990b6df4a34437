"""Model x strategy x budget to rows: captured, planned, rewritten, proven exact, timed against eager in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import strategies
from bench.machine.clock import clock_for, gradients_put_back, spread
from bench.machine.memory_need import check_fits
from bench.show.terminal import console, say
from bench.workloads.spec import WorkloadSpec
from planner.solve import Problem, Solution, Status, solve_if_needed
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory, guarded
from profiler.measuring.op_times import Measured, measure
from profiler.measuring.restoring import Touched
from profiler.tracing.whole_step import TracedStep
from profiler.workload import Workload
from rewriter.proof import Observation, Verification, compare, observe
from rewriter.replay import apply

PROVEN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One strategy at one budget on one model. Bytes are of total peak; ratios are to the eager step."""

    model: str
    free_gradients: bool
    early_updates: bool
    strategy: str
    budget: str
    status: str
    budget_bytes: int
    start_bytes: int
    eager_peak_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    predicted_overhead: float | None
    measured_ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    eager_s: float | None
    dropped: int
    reruns: int
    gap: float | None
    plan_s: float
    apply_s: float | None
    exact: bool | None
    note: str

    @property
    def step_share(self) -> float | None:
        """What the planned step adds to memory, relative to eager: 0.5 is half."""
        if self.measured_peak_bytes is None:
            return None
        return (self.measured_peak_bytes - self.start_bytes) / (self.eager_peak_bytes - self.start_bytes)

    @property
    def planned_s(self) -> float | None:
        """Seconds of the planned step, by its ratio to eager's."""
        return None if self.measured_ratio is None or self.eager_s is None else self.measured_ratio * self.eager_s

    @property
    def prediction_error(self) -> float | None:
        """Measured less predicted peak above the start, relative to measured."""
        if self.measured_peak_bytes is None or self.predicted_peak_bytes is None:
            return None
        above = self.measured_peak_bytes - self.start_bytes
        return (self.measured_peak_bytes - self.predicted_peak_bytes) / above if above else 0.0

    def data(self) -> dict[str, Any]:
        """The row as plain data, derived figures included."""
        return {**asdict(self), "step_share": self.step_share, "prediction_error": self.prediction_error}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The rows of one model, and the solutions behind them, for figures."""

    measured: Measured
    rows: list[RunRow]
    solutions: list[Solution]


@dataclass(kw_only=True)
class _Candidate:
    """One solution on its way to a row."""

    spec: str
    budget: str
    solution: Solution
    call: Callable[[], Any] | None = None
    apply_s: float | None = None
    proof: Verification | None = None
    ratios: list[float] = field(default_factory=list)  # seconds to eager's in the same round
    failure: str = ""  # why it was not proven or timed


def run_comparison(
    spec: WorkloadSpec, strategy_specs: Sequence[str], budgets: Sequence[str], *, pairs: int, time_limit_s: float
) -> Comparison:
    """Everything about one model; progress is shown throughout.

    A planned step that runs out of memory is a row that says so; OutOfMemory if the plain step does, or would.
    """
    chosen = [(name, strategies.make(name)) for name in strategy_specs]  # bad names fail before the work starts
    with _progress() as bar:
        task = bar.add_task("making the model", total=4 + 2 * len(chosen) * len(budgets))
        say(f"{spec.title}: making the model")

        def tell(text: str) -> None:
            bar.update(task, advance=1, description=text)
            say(text)

        workload = guarded(f"making {spec.title}", spec.make)
        step, model, optimizer, batch = workload
        tell("capturing the step")
        traced = guarded(f"capturing {spec.title}", lambda: spec.capture(workload))
        check_fits(spec.title, traced, proven_steps=PROVEN_STEPS)
        tell("measuring every op")
        measured = guarded(f"measuring {spec.title}", lambda: measure(traced, batch, show_progress=False))
        problems = {budget: _problem(measured, budget, time_limit_s) for budget in budgets}
        tell("eager, for comparison")
        expected = guarded(
            f"running {spec.title} without a plan",
            lambda: _observe(lambda b: step(model, optimizer, b), workload, traced),
        )
        candidates = []
        for budget in budgets:
            for name, strategy in chosen:
                tell(f"planning {name} at {budget}")
                solution = solve_if_needed(problems[budget], strategy, label=name)
                candidates.append(_Candidate(spec=name, budget=budget, solution=solution))
        for found in candidates:
            tell(f"rewriting and proving {found.spec} at {found.budget}")
            try:
                _prove(found, workload, measured.traced, expected, compare_gradients=not spec.free_gradients)
            except OutOfMemory as answer:
                found.failure = str(answer)
        say(f"timing, rounds of eager and planned steps: {pairs}")
        eager_s = _time_or_say_why(
            workload, traced, candidates, pairs, lambda i: bar.update(task, description=f"timing, round {i} of {pairs}")
        )
    rows = [_row(spec, found, expected, measured, eager_s) for found in candidates]
    return Comparison(measured=measured, rows=rows, solutions=[found.solution for found in candidates])


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _problem(measured: Measured, budget: str, time_limit_s: float) -> Problem:
    return Problem.of(measured.graph, budget, time_limit_s=time_limit_s)


def _observe(step: Callable[[Any], Any], workload: Workload, traced: TracedStep) -> Observation:
    return observe(step, Touched.by(traced, workload[3]), workload[3], steps=PROVEN_STEPS)


def _prove(
    found: _Candidate, workload: Workload, traced: TracedStep, expected: Observation, *, compare_gradients: bool
) -> None:
    """Rewrite the step and compare it with eager; a plan over budget is not run."""
    if found.solution.status is not Status.FITS:
        return
    schedule, timeline = found.solution.schedule, found.solution.timeline
    assert schedule is not None
    assert timeline is not None
    started = time.perf_counter()
    module = apply(traced, schedule)
    found.apply_s = time.perf_counter() - started
    convention, batch = traced.convention, workload[3]
    actual = guarded(
        "proving the planned step", lambda: _observe(lambda b: convention.call(module, b), workload, traced)
    )
    found.proof = compare(
        expected, actual, predicted_peak_bytes=timeline.above_start_bytes, compare_gradients=compare_gradients
    )
    found.call = lambda: convention.call(module, batch)


def _time_or_say_why(
    workload: Workload,
    traced: TracedStep,
    candidates: Sequence[_Candidate],
    pairs: int,
    tell: Callable[[int], None],
) -> float | None:
    """`_time`; if memory runs out, None, and every candidate says so: what was proven so far is kept."""
    try:
        return guarded("timing", lambda: _time(workload, traced, candidates, pairs, tell))
    except OutOfMemory as answer:
        for found in candidates:
            found.failure = found.failure or str(answer)
            found.ratios.clear()  # a median of fewer rounds than were asked for is none
        return None


def _time(
    workload: Workload,
    traced: TracedStep,
    candidates: Sequence[_Candidate],
    pairs: int,
    tell: Callable[[int], None],
) -> float:
    """Time eager and every planned step in turn; notes each one's ratios, returns eager's median seconds."""
    step, model, optimizer, batch = workload
    clock, eager, put_back = clock_for(model), list[float](), gradients_put_back(traced)
    gc.collect()
    for done in range(pairs):
        tell(done + 1)
        put_back()
        eager.append(clock.seconds(lambda: step(model, optimizer, batch)))
        for found in candidates:
            if found.call is not None:
                put_back()
                found.ratios.append(clock.seconds(found.call) / eager[-1])
    middle = spread(eager)
    assert middle is not None
    return middle.median


def _row(
    spec: WorkloadSpec, found: _Candidate, expected: Observation, measured: Measured, eager_s: float | None
) -> RunRow:
    solution, timeline, start = found.solution, found.solution.timeline, measured.graph.start_bytes
    ratios, proof = spread(found.ratios), found.proof
    measured_peak = start + proof.measured_peak_bytes if proof else None
    return RunRow(
        model=spec.title,
        free_gradients=spec.free_gradients,
        early_updates=spec.early_updates,
        strategy=found.spec,
        budget=found.budget,
        status=solution.status.value,
        budget_bytes=solution.problem.budget_bytes,
        start_bytes=start,
        eager_peak_bytes=start + expected.peak_bytes,
        predicted_peak_bytes=timeline.peak_bytes if timeline else None,
        measured_peak_bytes=measured_peak,
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
        note=_note(found, measured_peak),
    )


def _note(found: _Candidate, measured_peak_bytes: int | None) -> str:
    """What a reader of the row has to know: a failure, a difference, a peak over the budget, else the judge's words."""
    if found.failure:
        return found.failure
    if found.proof is not None and not found.proof.exact:
        return found.proof.first_mismatch
    over = (measured_peak_bytes or 0) - found.solution.problem.budget_bytes
    return f"measured {human_bytes(over)} over the budget" if over > 0 else found.solution.reason


RUN_COLUMNS = (
    "budget", "strategy", "status", "peak predicted", "measured", "of eager's step", "time predicted", "measured",
    "dropped", "gap", "plan s", "exact",
)  # fmt: skip


def run_cells(row: RunRow) -> tuple[str, ...]:
    """A row as text, in the order of RUN_COLUMNS."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return (
        row.budget,
        row.strategy,
        row.status,
        "-" if row.predicted_peak_bytes is None else human_bytes(row.predicted_peak_bytes),
        "-" if row.measured_peak_bytes is None else human_bytes(row.measured_peak_bytes),
        show(row.step_share, "{:.0%}"),
        show(None if row.predicted_overhead is None else 1 + row.predicted_overhead, "{:.2f}x"),
        show(row.measured_ratio, "{:.2f}x"),
        str(row.dropped),
        show(row.gap, "{:.1%}"),
        f"{row.plan_s:.2f}",
        "-" if row.exact is None else ("yes" if row.exact else f"NO: {row.note}"),
    )
