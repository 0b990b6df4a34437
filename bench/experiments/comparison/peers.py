"""What users would pick instead, on the same model, batch, seed and meter: each in a process of its own.

A peer that fails is a row that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bench.experiments.comparison.rows import PEER_COLUMNS, PeerRow, peer_cells
from bench.machine.clock import Clock, spread
from bench.machine.separate_process import SeparateProcessError, in_separate_process
from bench.show.tables import print_table
from bench.show.terminal import stage
from bench.workloads.peers import PEERS
from bench.workloads.spec import WorkloadSpec
from profiler.measuring.restoring import Touched
from profiler.workload import Workload
from rewriter.proof import Observation, compare, observe

PROVEN_STEPS = 2


def peer_rows(spec: WorkloadSpec, names: Sequence[str], *, pairs: int) -> Iterator[PeerRow]:
    """Each peer on one model, as soon as it is measured."""
    for name in names:
        with stage(f"{spec.title}: {name}"):
            row = _row_or_why_not(spec, name, pairs)
        yield row


def _row_or_why_not(spec: WorkloadSpec, name: str, pairs: int) -> PeerRow:
    try:
        return in_separate_process(measure_peer, spec, name, pairs, what=spec.title)
    except SeparateProcessError as error:
        return PeerRow(model=spec.title, peer=name, error=error.reason)


def print_peers(spec: WorkloadSpec, rows: Sequence[PeerRow], *, pairs: int) -> None:
    """The rows of peers as a table."""
    caption = (
        "Ratios to eager in the same process: peak of what the step adds to memory, and time (median and quartiles of "
        f"{pairs} rounds in turn). 'exact': after {PROVEN_STEPS} steps, compared bit by bit."
    )
    print_table(f"{spec.title}: what else there is", PEER_COLUMNS, [peer_cells(row) for row in rows], caption=caption)


def measure_peer(spec: WorkloadSpec, name: str, pairs: int) -> PeerRow:
    """One peer against eager, in this process; two models of the same seed."""
    plain, changed = spec.make(), spec.make()
    called = changed._replace(model=PEERS[name](changed.model))
    expected, actual = _seen(plain, plain.model), _seen(called, changed.model)
    proof = compare(expected, actual, predicted_peak_bytes=actual.peak_bytes)
    ratios = spread(_ratios(plain, called, pairs))
    assert ratios is not None
    return PeerRow(
        model=spec.title,
        peer=name,
        error="",
        peak_ratio=actual.peak_bytes / expected.peak_bytes,
        time_ratio=ratios.median,
        time_low=ratios.low,
        time_high=ratios.high,
        exact=proof.exact,
        first_mismatch=proof.first_mismatch,
        largest_difference=proof.largest_difference,
    )


def _seen(workload: Workload, model: nn.Module) -> Observation:
    """What a step leaves behind in `model`, which need not be the one that it calls."""
    torch.manual_seed(0)
    touched = Touched(model=model, optimizer=workload.optimizer, unread_gradients=list(model.parameters()))
    return observe(workload.run, touched, workload.batch, steps=PROVEN_STEPS)


def _ratios(plain: Workload, called: Workload, pairs: int) -> list[float]:
    clock, ratios = Clock(plain.device), []
    for _ in range(pairs):
        eager_s = clock.seconds(plain.run_once)
        ratios.append(clock.seconds(called.run_once) / eager_s)
    return ratios
