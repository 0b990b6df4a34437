"""`python -m bench exactness`: models x optimizers x strategies, each proven equal to eager to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

import strategies
from bench.experiments.experiment import Experiment, Table
from bench.experiments.results_file import save_rows
from bench.show.terminal import console, say
from bench.workloads.spec import OPTIMIZERS
from bench.workloads.zoo import ZOO
from planner.analysis import candidates
from planner.solve import Problem, solve
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
    dropped_share: float  # of the bytes of activations that may be dropped
    reruns: int
    prediction_error: float  # of the peak, relative to the measured one


def run_exactness(specs: Sequence[str], *, steps: int, out: Path | None) -> bool:
    """Prove every combination, print the matrix, save the rows; True if all are exact.

    Each strategy is asked for a budget that no plan meets, so that it drops all it can.
    """
    rows: list[ExactnessRow] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("proving", total=len(MODELS) * len(OPTIMIZER_NAMES) * len(specs))
        for row in _rows(specs, steps):
            done = f"{row.model} {row.optimizer} {row.strategy}"
            bar.update(task, advance=1, description=done)
            say(f"{done}: {'exact' if row.exact else 'DIFFERS'}")
            rows.append(row)
    caption = (
        f"{steps} steps against eager: every returned value, gradient, parameter, buffer, optimizer state and the "
        "generator compared bit by bit; the share of activation bytes dropped"
    )
    EXACTNESS.print("Exactness", rows, caption=caption)
    if out is not None:
        save_rows(out, EXACTNESS, rows)
    return all(row.exact for row in rows)


def _rows(specs: Sequence[str], steps: int) -> Iterator[ExactnessRow]:
    for model, (batch, options) in MODELS.items():
        for optimizer in OPTIMIZER_NAMES:
            ready = prepare(ZOO[model](batch, optimizer=OPTIMIZERS[optimizer], **options), ["100%"])
            expected = ready.eager_seen(ready.workload.batch, steps=steps)
            for spec in specs:
                yield _row(ready, expected, model=model, optimizer=optimizer, spec=spec)


def _row(ready: ReadyStep, expected: Observation, *, model: str, optimizer: str, spec: str) -> ExactnessRow:
    solution = solve(Problem(graph=ready.graph, budget_bytes=1), strategies.make(spec), label=spec)
    assert solution.schedule is not None
    assert solution.timeline is not None
    proof = ready.proof_against(expected, ready.replayed(solution.schedule), solution, ready.workload.batch)
    sizes = {s: ready.graph.storages[s].nbytes for s in candidates(ready.graph)}
    return ExactnessRow(
        model=model,
        optimizer=optimizer,
        strategy=spec,
        steps=proof.steps,
        exact=proof.exact,
        first_mismatch=proof.first_mismatch,
        compared=dict(proof.compared),
        dropped_share=sum(sizes[s] for s in solution.dropped) / sum(sizes.values()),
        reruns=solution.timeline.reruns,
        prediction_error=proof.prediction_error,
    )


def matrix(rows: Sequence[ExactnessRow]) -> Table:
    """Rows as one line per model and optimizer, one column per strategy."""
    specs = tuple(dict.fromkeys(row.strategy for row in rows))
    table: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cell = f"{'exact' if row.exact else 'DIFFERS: ' + row.first_mismatch}, {row.dropped_share:.0%} dropped"
        table.setdefault((row.model, row.optimizer), []).append(cell)
    return ("model", "optimizer", *specs), [(*key, *cells) for key, cells in table.items()]


EXACTNESS = Experiment(kind="exactness", rows=(ExactnessRow,), table=matrix)
