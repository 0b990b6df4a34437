"""`python -m bench exactness`: models x optimizers x strategies, each proven equal to eager to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

import strategies
from bench.experiments.results_file import save_rows
from bench.show.tables import print_table
from bench.show.terminal import console, say
from bench.workloads.spec import OPTIMIZERS
from bench.workloads.zoo import ZOO
from planner.analysis import candidates
from planner.solve import Problem, solve
from profiler.measuring.op_times import measure
from profiler.measuring.restoring import Touched
from profiler.tracing.whole_step import TracedStep, capture
from profiler.workload import Workload
from rewriter.proof import Observation, compare, observe
from rewriter.replay import apply

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


def run_exactness(specs: Sequence[str], *, steps: int, out: Path | None) -> bool:
    """Prove every combination, print the matrix, save the rows; True if all are exact.

    Each strategy is asked for a budget that no plan meets, so that it drops all it can.
    """
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("proving", total=len(MODELS) * len(OPTIMIZER_NAMES) * len(specs))
        for row in _rows(specs, steps):
            done = f"{row['model']} {row['optimizer']} {row['strategy']}"
            bar.update(task, advance=1, description=done)
            say(f"{done}: {'exact' if row['exact'] else 'DIFFERS'}")
            rows.append(row)
    _print(rows, steps)
    if out is not None:
        save_rows(out, rows=rows)
    return all(row["exact"] for row in rows)


def _rows(specs: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    for model, (batch, options) in MODELS.items():
        for optimizer in OPTIMIZER_NAMES:
            workload = ZOO[model](batch, optimizer=OPTIMIZERS[optimizer], **options)
            yield from _rows_of(workload, {"model": model, "optimizer": optimizer}, specs, steps)


def _rows_of(workload: Workload, names: dict[str, Any], specs: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    step, model, optimizer, batch = workload
    traced = measure(capture(step, model, optimizer, batch), batch, show_progress=False).traced
    expected = _observed(lambda b: step(model, optimizer, b), workload, traced, steps)
    for spec in specs:
        problem = Problem(graph=traced.graph, budget_bytes=1)
        solution = solve(problem, strategies.make(spec), label=spec)
        assert solution.schedule is not None
        assert solution.timeline is not None
        module = apply(traced, solution.schedule)
        actual = _observed(lambda b, m=module: traced.convention.call(m, b), workload, traced, steps)
        proof = compare(expected, actual, predicted_peak_bytes=solution.timeline.above_start_bytes)
        sizes = {s: traced.graph.storages[s].nbytes for s in candidates(traced.graph)}
        yield {
            **names,
            "strategy": spec,
            "steps": steps,
            "exact": proof.exact,
            "first_mismatch": proof.first_mismatch,
            "compared": dict(proof.compared),
            "dropped_share": sum(sizes[s] for s in solution.dropped) / sum(sizes.values()),
            "reruns": solution.timeline.reruns,
            "prediction_error": proof.prediction_error,
        }


def _observed(call: Any, workload: Workload, traced: TracedStep, steps: int) -> Observation:
    return observe(call, Touched.by(traced, workload[3]), workload[3], steps=steps)


def matrix(rows: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[Sequence[str]]]:
    """Rows as one line per model and optimizer, one column per strategy."""
    specs = tuple(dict.fromkeys(row["strategy"] for row in rows))
    table: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cell = f"{'exact' if row['exact'] else 'DIFFERS: ' + row['first_mismatch']}, {row['dropped_share']:.0%} dropped"
        table.setdefault((row["model"], row["optimizer"]), []).append(cell)
    return ("model", "optimizer", *specs), [(*key, *cells) for key, cells in table.items()]


def _print(rows: Sequence[dict[str, Any]], steps: int) -> None:
    caption = (
        f"{steps} steps against eager: every returned value, gradient, parameter, buffer, optimizer state and the "
        "generator compared bit by bit; the share of activation bytes dropped"
    )
    columns, lines = matrix(rows)
    print_table("Exactness", columns, lines, caption=caption)
