"""`python -m bench exactness`: models x optimizers x strategies, each proven equal to eager to the bit.

Beside the strategies of the step door: all moved to files that can be, and the same step through the model door.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

import strategies
from bench.experiments.acceptance_moves import ANY_PRICE
from bench.experiments.experiment import Experiment, Table
from bench.experiments.histories import History, first_difference, history_of
from bench.experiments.results_file import save_rows
from bench.show.terminal import console, say
from bench.workloads.spec import OPTIMIZERS
from bench.workloads.zoo import ZOO
from planner.analysis import candidates
from planner.solve import Problem, Solution, solve
from profiler.measuring.hosts import host_for
from profiler.workload import Workload
from rewriter import OverBudget, checkpoint_model
from rewriter.moving import HostAccess
from rewriter.pipeline import ReadyStep, prepare
from rewriter.proof import Observation

# Small enough to take ten steps in seconds, with everything that makes a model hard to recompute.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (4, {"image": 64}),
    "mobilenet": (16, {"image": 64}),
    "vit": (16, {"image": 64, "patch": 8, "layers": 3, "heads": 4, "width": 64, "dropout": 0.1}),
    "bert": (4, {"seq": 64, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                 "intermediate_size": 256, "vocab_size": 500}),
    "gpt2": (4, {"seq": 64, "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 500}),
}  # fmt: skip
OPTIMIZER_NAMES = ("sgd", "adamw", "adam-default")
TO_FILES = "offload_only"  # moves all it can
PLANNED_MODEL = "planned model, auto"
MODEL_BUDGETS = ("40%", "50%", "60%", "75%", "90%")  # the model door is asked for the first that a plan fits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessRow:
    """One strategy on one model with one optimizer, compared with eager bit by bit."""

    model: str
    optimizer: str
    strategy: str
    steps: int
    exact: bool
    first_mismatch: str
    compared: dict[str, int]  # kind of tensor -> how many
    dropped_share: float  # of the bytes of activations that may be dropped: dropped, or moved to files
    reruns: int
    prediction_error: float  # of the peak, relative to the measured one


def run_exactness(specs: Sequence[str], *, steps: int, out: Path | None) -> bool:
    """Prove every combination, print the matrix, save the rows; True if all are exact.

    Each strategy is asked for a budget that no plan meets, so that it drops all it can.
    """
    rows: list[ExactnessRow] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("proving", total=len(MODELS) * len(OPTIMIZER_NAMES) * (len(specs) + 2))
        for row in _rows(specs, steps):
            done = f"{row.model} {row.optimizer} {row.strategy}"
            bar.update(task, advance=1, description=done)
            say(f"{done}: {'exact' if row.exact else 'DIFFERS'}")
            rows.append(row)
    caption = (
        f"{steps} steps against eager: every returned value, gradient, parameter, buffer, optimizer state and the "
        "generator compared bit by bit; the share of activation bytes dropped, or moved to files"
    )
    EXACTNESS.print("Exactness", rows, caption=caption)
    if out is not None:
        save_rows(out, EXACTNESS, rows)
    return all(row.exact for row in rows)


def _rows(specs: Sequence[str], steps: int) -> Iterator[ExactnessRow]:
    for model, (batch, options) in MODELS.items():
        for optimizer in OPTIMIZER_NAMES:
            make = partial(ZOO[model], batch, optimizer=OPTIMIZERS[optimizer], **options)
            ready = prepare(make(), ["100%"])
            expected = ready.eager_seen(ready.workload.batch, steps=steps)
            for spec in specs:
                problem = Problem(graph=ready.graph, budget_bytes=1)
                yield _row(ready, expected, problem, model=model, optimizer=optimizer, spec=spec)
            yield _moved_row(ready, expected, model=model, optimizer=optimizer)
            yield _model_row(make(), make, model=model, optimizer=optimizer, steps=steps)


def _row(
    ready: ReadyStep, expected: Observation, problem: Problem, *, model: str, optimizer: str, spec: str
) -> ExactnessRow:
    solution = solve(problem, strategies.make(spec), label=spec)
    assert solution.schedule is not None
    proof = ready.proof_against(expected, ready.replayed(solution.schedule), solution, ready.workload.batch)
    return ExactnessRow(
        model=model,
        optimizer=optimizer,
        strategy=spec,
        steps=proof.steps,
        exact=proof.exact,
        first_mismatch=proof.first_mismatch,
        compared=dict(proof.compared),
        dropped_share=_share_dropped(solution),
        reruns=_reruns(solution),
        prediction_error=proof.prediction_error,
    )


def _share_dropped(solution: Solution) -> float:
    """What the plan drops or moves, of the bytes of all activations that may be."""
    graph = solution.problem.graph
    sizes = {s: graph.storages[s].nbytes for s in candidates(graph)}
    gone = {*solution.dropped, *solution.moved} & sizes.keys()
    return sum(sizes[s] for s in gone) / sum(sizes.values())


def _reruns(solution: Solution) -> int:
    assert solution.timeline is not None
    return solution.timeline.reruns


def _moved_row(ready: ReadyStep, expected: Observation, *, model: str, optimizer: str) -> ExactnessRow:
    """The same with all moved to files that can be."""
    with tempfile.TemporaryDirectory() as folder:
        access = HostAccess(host=host_for(ready.workload.device, folder), link=ANY_PRICE)
        problem = Problem(graph=ready.graph, budget_bytes=1, host_link=ANY_PRICE)
        moving = replace(ready, access=access)
        return _row(moving, expected, problem, model=model, optimizer=optimizer, spec=TO_FILES)


def _model_row(plain: Workload, make: Any, *, model: str, optimizer: str, steps: int) -> ExactnessRow:
    """The same through the model door, beside plain training from the same seed."""
    expected = history_of(plain.run_once, plain, steps=steps)
    planned, actual = _planned_history(make, steps)
    first = first_difference(expected, actual)
    return ExactnessRow(
        model=model,
        optimizer=optimizer,
        strategy=PLANNED_MODEL,
        steps=steps,
        exact=not first,
        first_mismatch=first,
        compared=dict(Counter(name.partition(" ")[0] for name, _ in expected[-1])),
        dropped_share=_share_dropped(planned.solution),
        reruns=_reruns(planned.solution),
        prediction_error=planned.verification.prediction_error,
    )


def _planned_history(make: Any, steps: int) -> tuple[Any, History]:
    """What `model.planned` tells, and what steps left, at the smallest of the budgets that a plan fits."""
    for budget in MODEL_BUDGETS:
        workload: Workload = make()
        found: Any = checkpoint_model(workload.model, budget=budget, show_progress=False)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # how plans are made is not the question here
                return found.planned, history_of(workload.run_once, workload, steps=steps)
        except OverBudget:
            if budget == MODEL_BUDGETS[-1]:
                raise
    raise AssertionError("there is a last budget")


def matrix(rows: Sequence[ExactnessRow]) -> Table:
    """Rows as one line per model and optimizer, one column per strategy."""
    specs = tuple(dict.fromkeys(row.strategy for row in rows))
    table: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cell = f"{'exact' if row.exact else 'DIFFERS: ' + row.first_mismatch}, {row.dropped_share:.0%} dropped"
        table.setdefault((row.model, row.optimizer), []).append(cell)
    return ("model", "optimizer", *specs), [(*key, *cells) for key, cells in table.items()]


EXACTNESS = Experiment(kind="exactness", rows=(ExactnessRow,), table=matrix)
