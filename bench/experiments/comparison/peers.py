"""What users would pick instead, and the planned model, on the same model, batch, seed and meter.

Each is measured in a process of its own, once it has compiled, captured and planned whatever it does at first. A peer
that fails is a row that says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bench.experiments.comparison.rows import PEER_COLUMNS, PeerRow, peer_cells
from bench.machine.clock import Clock, Taken, spread
from bench.machine.separate_process import SeparateProcessError, in_separate_process
from bench.show.tables import print_table
from bench.show.terminal import console, stage
from bench.workloads.peers import peer_named
from bench.workloads.spec import WorkloadSpec
from profiler.measuring.restoring import Touched
from profiler.workload import Workload
from rewriter.proof import Observation, compare, observe

PROVEN_STEPS = 2

# Enough for all that is done once: seeing a step, capturing and planning the next, compiling for other sizes.
FIRST_STEPS = 5


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
    for row in rows:
        if row.promise:
            console.print(f"{row.peer}: {row.promise}")


def measure_peer(spec: WorkloadSpec, name: str, pairs: int) -> PeerRow:
    """One peer against eager, in this process; two models of the same seed."""
    plain, changed = spec.make(), spec.make()
    called = changed._replace(model=peer_named(name)(changed.model))
    _get_ready(called, changed.model)
    promise = _promise(changed.model)
    expected, actual = _seen(plain, plain.model), _seen(called, changed.model)
    proof = compare(expected, actual, predicted_peak_bytes=actual.peak_bytes)
    taken = _ratios(plain, called, pairs)
    ratios, cpu = spread([ratio.wall_s for ratio in taken]), spread([ratio.cpu_s for ratio in taken])
    assert ratios is not None
    assert cpu is not None
    return PeerRow(
        model=spec.title,
        peer=name,
        error="",
        peak_ratio=actual.peak_bytes / expected.peak_bytes,
        time_ratio=ratios.median,
        time_low=ratios.low,
        time_high=ratios.high,
        cpu_ratio=cpu.median,
        exact=proof.exact,
        first_mismatch=proof.first_mismatch,
        largest_difference=proof.largest_difference,
        promise=promise,
    )


def _touched(workload: Workload, model: nn.Module) -> Touched:
    return Touched(model=model, optimizer=workload.optimizer, unread_gradients=list(model.parameters()))


def _get_ready(workload: Workload, model: nn.Module) -> None:
    """Run the first steps, which no later one is like; nothing is left of them but what was compiled or planned."""
    with _touched(workload, model).kept():
        for _ in range(FIRST_STEPS):
            workload.run_once()


def _promise(model: nn.Module) -> str:
    """How a planned model is planned and what that promises; PlannerError if nothing is."""
    planned = getattr(model, "planned", None)
    if planned is None:
        return ""
    solution = planned.solution  # there once it is planned
    return f"{planned.way.value}, {solution.status.value}: {planned.promise}"


def _seen(workload: Workload, model: nn.Module) -> Observation:
    """What a step leaves behind in `model`, which need not be the one that it calls."""
    torch.manual_seed(0)
    return observe(workload.run, _touched(workload, model), workload.batch, steps=PROVEN_STEPS)


def _ratios(plain: Workload, called: Workload, pairs: int) -> list[Taken]:
    clock, ratios = Clock(plain.device), []
    for _ in range(pairs):
        eager = clock.taken(plain.run_once)
        ratios.append(clock.taken(called.run_once).over(eager))
    return ratios
