"""`python -m bench scaled`: the peak at a batch that was never captured, from two others, against the meter."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.prepared import prepared
from bench.experiments.results_file import save_rows
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.scaling import Scaling
from planner.simulator import unplanned
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory
from profiler.measuring.meters import meter_for, peak_above_start

CASES = (
    WorkloadSpec(model="resnet50", batch=16),
    WorkloadSpec(model="mobilenet", batch=32),
    WorkloadSpec(model="bert", batch=8, seq=128),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRow:
    """One model: the peak that its step adds to memory, by two predictions and by the allocator's own count."""

    model: str
    batch: int
    from_batches: tuple[int, int]
    scaled_bytes: int
    captured_bytes: int
    allocator_bytes: int
    tensors_exact: bool


def run_scaled(specs: Sequence[WorkloadSpec], *, out: Path | None) -> list[ScaledRow]:
    """One row a model, saved as they come: captured at a quarter and half of its batch, run at the whole."""
    rows: list[ScaledRow] = []
    for spec in specs:
        with stage(f"{spec.title}: measuring at smaller batches, running at its own"):
            rows.append(scaled_row(spec))
        if out is not None:
            save_rows(out, SCALED, rows)
    SCALED.print("Peaks predicted from other batches", rows, caption=CAPTION)
    return rows


CAPTION = (
    "Peaks are of what the captured step adds to memory. 'scaled': the line through measured graphs at the two other "
    "batches; 'captured': a measured graph at the batch itself. Tensors scale exactly; workspaces of ops need not."
)


def scaled_row(spec: WorkloadSpec) -> ScaledRow:
    """The batch of `spec` by two predictions, and by the allocator."""
    whole = spec.batch_size
    quarter = max(2, whole // 4)  # a batch of 1 has views where others have copies
    sizes = (quarter, max(quarter + 1, whole // 2))
    low, high = (prepared(spec.at_batch(size)).graph for size in sizes)
    predicted = Scaling(low=low, high=high, low_batch=sizes[0], high_batch=sizes[1]).at(whole)
    captured, allocator_bytes = _run(spec)
    return ScaledRow(
        model=spec.title,
        batch=whole,
        from_batches=sizes,
        scaled_bytes=_peak(predicted),
        captured_bytes=_peak(captured),
        allocator_bytes=allocator_bytes,
        tensors_exact=[s.nbytes for s in predicted.storages] == [s.nbytes for s in captured.storages],
    )


def _run(spec: WorkloadSpec) -> tuple[Graph, int]:
    """The measured graph, and what the captured step adds to memory by the allocator's own count."""
    ready = prepared(spec)
    if not ready.as_it_is:
        raise OutOfMemory(f"{spec.title} does not fit on this machine as it is, so that there is nothing to compare")
    workload = ready.workload
    ready.unplanned(workload.batch)
    for p in workload.model.parameters():
        p.grad = None
    gc.collect()
    meter = meter_for(workload.device)
    return ready.graph, peak_above_start(meter, lambda: ready.unplanned(workload.batch))


def _peak(graph: Graph) -> int:
    return unplanned(graph).above_start_bytes


COLUMNS = ("model", "from batches", "scaled", "off by", "captured", "off by", "allocator", "tensors exact")


def scaled_cells(row: ScaledRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    truth = row.allocator_bytes
    return (
        row.model,
        " and ".join(map(str, row.from_batches)),
        human_bytes(row.scaled_bytes),
        f"{row.scaled_bytes / truth - 1:+.2%}",
        human_bytes(row.captured_bytes),
        f"{row.captured_bytes / truth - 1:+.2%}",
        human_bytes(truth),
        "yes" if row.tensors_exact else "no",
    )


SCALED = Experiment(kind="scaled", rows=(ScaledRow,), table=line_by_line(COLUMNS, scaled_cells))
