"""What users would pick instead, on the same model, batch, seed and meter: each in a process of its own.

A peer that fails is a row that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from bench.machine.clock import clock_for, spread
from bench.machine.separate_process import SeparateProcessError, in_separate_process
from bench.show.tables import print_table
from bench.show.terminal import stage
from bench.workloads.peers import PEERS
from bench.workloads.spec import WorkloadSpec
from profiler.measuring.restoring import Touched
from profiler.workload import Workload
from rewriter.proof import Observation, compare, observe

PROVEN_STEPS = 2


def peer_rows(spec: WorkloadSpec, names: Sequence[str], *, pairs: int) -> Iterator[dict[str, Any]]:
    """Each peer on one model, as soon as it is measured."""
    for name in names:
        with stage(f"{spec.title}: {name}"):
            row = _row_or_why_not(spec, name, pairs)
        yield row


def _row_or_why_not(spec: WorkloadSpec, name: str, pairs: int) -> dict[str, Any]:
    try:
        return in_separate_process(measure_peer, spec, name, pairs, what=spec.title)
    except SeparateProcessError as error:
        return {"model": spec.title, "peer": name, "error": error.reason}


def print_peers(spec: WorkloadSpec, rows: Sequence[dict[str, Any]], *, pairs: int) -> None:
    """The rows of peers as a table."""
    caption = (
        "Ratios to eager in the same process: peak of what the step adds to memory, and time (median and quartiles of "
        f"{pairs} rounds in turn). 'exact': after {PROVEN_STEPS} steps, compared bit by bit."
    )
    print_table(f"{spec.title}: what else there is", COLUMNS, [peer_cells(row) for row in rows], caption=caption)


def measure_peer(spec: WorkloadSpec, name: str, pairs: int) -> dict[str, Any]:
    """One peer against eager, in this process; two models of the same seed."""
    plain, changed = spec.make(), spec.make()
    called = PEERS[name](changed[1])
    expected = _observe(plain, plain[1])
    actual = _observe(changed, called)
    proof = compare(expected, actual, predicted_peak_bytes=actual.peak_bytes)
    ratios = spread(_ratios(plain, changed, called, pairs))
    assert ratios is not None
    return {
        "model": spec.title,
        "peer": name,
        "error": "",
        "peak_ratio": actual.peak_bytes / expected.peak_bytes,
        "time_ratio": ratios.median,
        "time_low": ratios.low,
        "time_high": ratios.high,
        "exact": proof.exact,
        "first_mismatch": proof.first_mismatch,
        "largest_difference": proof.largest_difference,
    }


def _observe(workload: Workload, called: nn.Module) -> Observation:
    step, model, optimizer, batch = workload
    torch.manual_seed(0)
    touched = Touched(model=model, optimizer=optimizer, unread_gradients=list(model.parameters()))
    return observe(lambda b: step(called, optimizer, b), touched, batch, steps=PROVEN_STEPS)


def _ratios(plain: Workload, changed: Workload, called: nn.Module, pairs: int) -> list[float]:
    clock, ratios = clock_for(plain[1]), []
    for _ in range(pairs):
        eager_s = clock.seconds(lambda: plain[0](plain[1], plain[2], plain[3]))
        ratios.append(clock.seconds(lambda: changed[0](called, changed[2], changed[3])) / eager_s)
    return ratios


COLUMNS = ("what", "peak", "time", "quartiles", "exact", "first difference")


def peer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    if row["error"]:
        return (row["peer"], "-", "-", "-", "-", row["error"])
    spread = f"{row['time_low']:.2f}-{row['time_high']:.2f}"
    verdict = "yes" if row["exact"] else "NO"
    return (
        row["peer"],
        f"{row['peak_ratio']:.2f}",
        f"{row['time_ratio']:.2f}x",
        spread,
        verdict,
        row["first_mismatch"],
    )
