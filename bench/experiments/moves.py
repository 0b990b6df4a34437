"""`python -m bench moves`: a plan that moves tensors to files, carried out; what was predicted of it against the meter.

Bytes follow from the order of steps and waits from speeds, so the two are held against the meter each for itself: as
fast as this machine copies, and with every copy held up to the speed of a slower disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import strategies
from bench.experiments.comparison.planned_steps import waited_s
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.prepared import prepared
from bench.experiments.results_file import save_rows
from bench.machine.clock import Clock, Spread, gradients_put_back, spread
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec, torch_device
from planner.errors import NoPlan, PlannerError
from planner.host_link import GIGA
from planner.solve import Problem, Solution, solve
from planner.units import human_bytes
from profiler.backend import backend_for, is_accelerator
from profiler.measuring.hosts import host_for
from profiler.measuring.link_speed import measured_link
from rewriter.moving import HostAccess
from rewriter.pipeline import Planned, ReadyStep

DEFAULT = WorkloadSpec(model="mobilenet", batch=4, image=224)  # much memory for its time: copies are hard to hide
ROUNDS = 9  # of the step with and without moves, in turn
PROVEN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRow:
    """One plan within one budget, over a link as it is or held up to `held_to_gb_per_s`. Bytes are above the start."""

    model: str
    strategy: str
    budget: str
    held_to_gb_per_s: float | None
    link: str  # as measured beforehand, held up as the copies of the step are
    tensors: int
    moved_bytes: int
    unplanned_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_wait_s: float
    wait: Spread  # of a step, for copies, in seconds
    predicted_s: float
    planned: Spread  # seconds of a step
    unplanned: Spread
    rounds: int
    exact: bool


def run_moves(
    spec: WorkloadSpec,
    *,
    strategy: str,
    budgets: Sequence[str],
    speeds: Sequence[float | None],
    folder: Path,
    rounds: int,
    out: Path | None,
) -> list[MovedRow]:
    """One row a budget and speed; saved as they come."""
    if is_accelerator(torch_device(spec.device)):
        raise PlannerError("moves: a GPU is not asked how long it waits for copies; leave out --device")
    rows: list[MovedRow] = []
    with stage(f"{spec.title}: capturing and measuring"):
        ready = prepared(spec, budgets)
    for budget in budgets:
        for speed in speeds:
            with stage(f"{spec.title}: {strategy} at {budget}, {_held(speed)}"):
                rows.append(moved_row(ready, folder, strategy=strategy, budget=budget, speed=speed, rounds=rounds))
            if out is not None:
                save_rows(out, MOVES, rows)
    MOVES.print("Moves to files, carried out", rows, caption=CAPTION)
    return rows


def moved_row(
    ready: ReadyStep, folder: Path, *, strategy: str, budget: str, speed: float | None, rounds: int
) -> MovedRow:
    """A plan made for the link as measured now, proven, and run in turn with the step without moves."""
    ready = replace(ready, access=_access(ready, folder, speed))
    assert ready.access is not None
    problem = ready.access.offered_in(Problem.of(ready.graph, budget))
    solution = solve(problem, strategies.make(strategy), label=strategy)
    if solution.schedule is None or solution.timeline is None:
        raise NoPlan(f"{strategy} on {ready.graph.name}: {solution.reason}")
    planned = ready.replayed(solution.schedule)
    seen = ready.proof(planned, solution, ready.workload.batch, steps=PROVEN_STEPS)
    times = _timed(ready, planned, rounds)
    return replace(
        _row(ready, solution, times, strategy=strategy, budget=budget),
        held_to_gb_per_s=speed,
        measured_peak_bytes=seen.measured_peak_bytes,
        exact=seen.exact,
    )


def _access(ready: ReadyStep, folder: Path, speed: float | None) -> HostAccess:
    device = ready.workload.device
    idle = backend_for(device).idle
    late = None if speed is None else lambda nbytes: idle(nbytes / (speed * GIGA))
    host = host_for(device, folder, before_copy=late)
    return HostAccess(host=host, link=measured_link(host, device))


@dataclass(frozen=True, kw_only=True)
class _Times:
    waits: list[float]
    planned: list[float]
    unplanned: list[float]


def _timed(ready: ReadyStep, planned: Planned, rounds: int) -> _Times:
    """Seconds with and without moves in turn, and what of the former was waited; a first of each is left out."""
    clock, put_back = Clock(ready.workload.device), gradients_put_back(ready.traced)

    def seconds(version: Planned) -> float:
        put_back()
        return clock.seconds(partial(version, ready.workload.batch))

    for version in (ready.unplanned, planned):
        seconds(version)
    times = _Times(waits=[], planned=[], unplanned=[])
    for _ in range(rounds):
        times.unplanned.append(seconds(ready.unplanned))
        before = waited_s(ready)
        times.planned.append(seconds(planned))
        times.waits.append(waited_s(ready) - before)
    return times


def _row(ready: ReadyStep, solution: Solution, times: _Times, *, strategy: str, budget: str) -> MovedRow:
    timeline, graph = solution.timeline, ready.graph
    wait, planned, unplanned = spread(times.waits), spread(times.planned), spread(times.unplanned)
    assert timeline is not None
    assert wait is not None
    assert planned is not None
    assert unplanned is not None
    return MovedRow(
        model=graph.name,
        strategy=strategy,
        budget=budget,
        held_to_gb_per_s=None,
        link=str(solution.problem.host_link),
        tensors=len(solution.moved),
        moved_bytes=timeline.moved_bytes,
        unplanned_peak_bytes=solution.problem.unplanned.above_start_bytes,
        predicted_peak_bytes=timeline.above_start_bytes,
        measured_peak_bytes=0,
        predicted_wait_s=timeline.stall_us / 1e6,
        wait=wait,
        predicted_s=(timeline.base_us + timeline.extra_us) / 1e6,
        planned=planned,
        unplanned=unplanned,
        rounds=len(times.waits),
        exact=False,
    )


# -- telling --------------------------------------------------------------------------------------------------------

COLUMNS = (
    "step",
    "plan",
    "copies",
    "link",
    "moved",
    "peak",
    "measured",
    "waits",
    "measured",
    "time",
    "without",
    "equal",
)

CAPTION = (
    "Peaks are of what the step adds to memory, with the unplanned one in brackets; 'waits' is what a step waits for "
    "copies, predicted for the link as it was measured before the plan was made, then measured (median and quartiles), "
    "and how far the prediction is off. 'time' and 'without': seconds of a step that moves, and of one that does not, "
    "in turn. 'equal': all that the step leaves is eager's to the bit."
)


def _held(speed: float | None) -> str:
    return "as fast as they go" if speed is None else f"held up to {speed:g} GB/s"


def _off_by(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured else "-"


def moved_cells(row: MovedRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    wait = row.wait
    error = row.predicted_peak_bytes / row.measured_peak_bytes - 1 if row.measured_peak_bytes else 0.0
    return (
        row.model,
        f"{row.strategy}, {row.budget}",
        _held(row.held_to_gb_per_s),
        row.link,
        f"{row.tensors}, {human_bytes(row.moved_bytes)}",
        f"{human_bytes(row.predicted_peak_bytes)} ({human_bytes(row.unplanned_peak_bytes)})",
        f"{human_bytes(row.measured_peak_bytes)} ({error:+.2%})",
        f"{1e3 * row.predicted_wait_s:.0f} ms",
        f"{1e3 * wait.median:.0f} ms ({1e3 * wait.low:.0f}-{1e3 * wait.high:.0f}, "
        f"{_off_by(row.predicted_wait_s, wait.median)})",
        f"{row.planned.median:.3f} s",
        f"{row.unplanned.median:.3f} s",
        "yes" if row.exact else "NO",
    )


def _below(results: Results[MovedRow]) -> str:
    return f"\n{CAPTION}\n"


MOVES = Experiment(kind="moves", rows=(MovedRow,), table=line_by_line(COLUMNS, moved_cells), below=_below)
