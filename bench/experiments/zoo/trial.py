"""One architecture through one door: planned and plain training side by side, from the same seed, to the bit."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.experiments.histories import History, first_difference, history_of
from bench.experiments.zoo.rows import Door, Outcome, ZooRow
from bench.machine.clock import Clock, spread
from bench.machine.separate_process import reason_of
from bench.workloads.architectures.catalogue import Architecture
from planner.errors import PlannerError
from planner.solve import Solution
from profiler.workload import Workload
from rewriter import OverBudget, VerificationError, checkpoint, checkpoint_model
from rewriter.proof import Verification

BUDGETS = ("60%", "75%", "90%", "100%")  # the first that fits is taken
STRATEGY = "mutwo"
STEPS = 4  # the model door plans at the second
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """A workload that was trained a few steps under a plan."""

    call: Callable[[], Any]  # one step more
    history: History
    budget: str
    prepare_s: float
    solution: Solution
    verification: Verification | None
    way: str = ""


def try_architecture(architecture: Architecture, door: Door) -> ZooRow:
    """Train a few steps planned and plain; what came of it. What libraries and plans warn of is not told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _tried(architecture, door)


def _tried(architecture: Architecture, door: Door) -> ZooRow:
    row = ZooRow(
        library=architecture.library.value,
        family=architecture.family,
        model=architecture.model,
        door=door,
        outcome=Outcome.FAILED,
    )
    plain = architecture.make()
    expected = history_of(plain.run_once, plain, steps=STEPS)
    try:
        trained = _trained(architecture, _DOORS[door])
    except VerificationError as error:
        return replace(row, outcome=Outcome.TOLD, note=reason_of(error))
    except PlannerError as error:
        return replace(row, outcome=Outcome.REFUSED, note=reason_of(error))
    row = replace(row, budget=trained.budget, way=trained.way, prepare_s=trained.prepare_s)
    first = first_difference(expected, trained.history)
    if first:
        return replace(row, outcome=Outcome.SILENT, note=first)
    return _measured(row, trained, plain)


def _measured(row: ZooRow, trained: _Trained, plain: Workload) -> ZooRow:
    proof, plan = trained.verification, trained.solution.plan
    ratios = spread(_ratios(plain.run_once, trained.call, Clock(plain.device)))
    return replace(
        row,
        outcome=Outcome.EXACT if plan is not None and plan.evictions else Outcome.NOTHING_TO_DO,
        time_ratio=None if ratios is None else ratios.median,
        peak_ratio=None if proof is None else proof.measured_peak_bytes / max(1, proof.eager_peak_bytes),
        prediction_error=None if proof is None else proof.prediction_error,
    )


def _ratios(plain: Callable[[], Any], planned: Callable[[], Any], clock: Clock) -> list[float]:
    found = []
    for _ in range(ROUNDS):
        plain_s = clock.seconds(plain)
        found.append(clock.seconds(planned) / plain_s)
    return found


# -- through a door -------------------------------------------------------------------------------------------------


def _trained(architecture: Architecture, through: Callable[[Workload, str], _Trained]) -> _Trained:
    """Under the smallest budget that a plan fits, each tried on a workload of its own."""
    for budget in BUDGETS[:-1]:
        try:
            return through(architecture.make(), budget)
        except OverBudget:
            continue
    return through(architecture.make(), BUDGETS[-1])


def _by_step(workload: Workload, budget: str) -> _Trained:
    started = time.perf_counter()
    step = checkpoint(*workload, budget=budget, strategy=STRATEGY, show_progress=False)
    prepare_s = time.perf_counter() - started

    def call() -> Any:
        return step(workload.batch)

    return _Trained(
        call=call,
        history=history_of(call, workload, steps=STEPS),
        budget=budget,
        prepare_s=prepare_s,
        solution=step.solution,
        verification=step.verification,
    )


def _by_model(workload: Workload, budget: str) -> _Trained:
    """Its second training step captures and plans: what that takes longer than the last is the preparation."""
    model: Any = checkpoint_model(workload.model, budget=budget, strategy=STRATEGY)
    seconds: list[float] = []

    def call() -> Any:
        started = time.perf_counter()
        result = workload.run_once()
        seconds.append(time.perf_counter() - started)
        return result

    history = history_of(call, workload, steps=STEPS)
    return _Trained(
        call=workload.run_once,
        history=history,
        budget=budget,
        prepare_s=max(0.0, sum(seconds) - STEPS * seconds[-1]),
        solution=model.planned.solution,
        verification=model.planned.verification,
        way=model.planned.way.value,
    )


_DOORS = {Door.STEP: _by_step, Door.MODEL: _by_model}
