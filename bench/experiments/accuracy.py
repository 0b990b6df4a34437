"""`python -m bench accuracy`: the simulated peak and the op times against two independent meters.

Each model runs in a fresh process of its own, because the high-water mark of one that already ran something
says nothing, and with an allocator that gives memory back.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.prepared import prepared
from bench.experiments.results_file import save_rows
from bench.machine.clock import Clock, gradients_put_back, spread
from bench.machine.separate_process import in_separate_process
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError
from planner.simulator import unplanned
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory
from profiler.measuring.meters import meter_for, peak_above_start
from rewriter.pipeline import ReadyStep

CASES = (
    WorkloadSpec(model="resnet152", batch=8),
    WorkloadSpec(model="bert", batch=8, seq=128),
    WorkloadSpec(model="gpt2", batch=4, seq=256),
    WorkloadSpec(model="vit", batch=8),
    WorkloadSpec(model="mobilenet", batch=16),
)
# glibc gives blocks above this size back to the system at once, so that the process shrinks when tensors die.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow:
    """One model. Peaks are of what the step adds to memory; ratios are medians over pairs taken in turn."""

    model: str
    ops: int
    capture_s: float
    measure_s: float
    measure_in_steps: float
    simulated_bytes: int
    allocator_bytes: int
    eager_allocator_bytes: int
    process_bytes: int
    sum_of_ops: float  # sum of op times to the captured step's
    captured_to_eager: float
    captured_low: float
    captured_high: float
    eager_s: float
    pairs: int


def run_accuracy(specs: Sequence[WorkloadSpec], *, pairs: int, out: Path | None) -> list[AccuracyRow]:
    """Measure each in a process of its own, print the table, and save the rows to `out`."""
    for spec in specs:
        if spec.device != "cpu":
            raise PlannerError(
                f"accuracy on {spec.device}: one of its meters is the process's own memory, which holds no GPU tensor; "
                "leave out --device, or use `python -m bench verify` for predicted against measured peaks"
            )
    rows: list[AccuracyRow] = []
    for spec in specs:
        with stage(f"measuring {spec.title} in a fresh process"):
            rows.append(in_separate_process(measure_accuracy, spec, pairs, what=spec.title, env=GIVING_BACK))
        ACCURACY.print("Accuracy so far", rows)
        if out is not None:
            save_rows(out, ACCURACY, rows)
    return rows


def measure_accuracy(spec: WorkloadSpec, pairs: int) -> AccuracyRow:
    """Everything about one model, in this process."""
    capture_s, measure_s, ready = _timed(spec)
    workload, traced, graph = ready.workload, ready.traced, ready.graph
    meter, put_back, clock = meter_for(workload.device), gradients_put_back(traced), Clock(workload.device)

    def captured() -> Any:
        return ready.unplanned(workload.batch)

    def from_clean(read: Callable[[Callable[[], Any]], int], call: Callable[[], Any]) -> int:
        for p in workload.model.parameters():
            p.grad = None
        put_back()
        gc.collect()
        return read(call)

    captured()
    process = from_clean(_process_peak, captured)
    allocator = from_clean(lambda call: peak_above_start(meter, call), captured)
    eager_allocator = from_clean(lambda call: peak_above_start(meter, call), workload.run_once)
    eager_times, captured_times = [], []
    for _ in range(pairs):
        put_back()
        eager_times.append(clock.seconds(workload.run_once))
        put_back()
        captured_times.append(clock.seconds(captured))
    ratios = spread([b / a for a, b in zip(eager_times, captured_times, strict=True)])
    assert ratios is not None
    step_s = statistics.median(captured_times)
    return AccuracyRow(
        model=spec.title,
        ops=len(graph.ops),
        capture_s=capture_s,
        measure_s=measure_s,
        measure_in_steps=measure_s / step_s,
        simulated_bytes=unplanned(graph).above_start_bytes,
        allocator_bytes=allocator,
        eager_allocator_bytes=eager_allocator,
        process_bytes=process,
        sum_of_ops=graph.time_us / 1e6 / step_s,
        captured_to_eager=ratios.median,
        captured_low=ratios.low,
        captured_high=ratios.high,
        eager_s=statistics.median(eager_times),
        pairs=pairs,
    )


def _timed(spec: WorkloadSpec) -> tuple[float, float, ReadyStep]:
    """Seconds of capturing, seconds of measuring, and the step; OutOfMemory if it does not fit as it is."""
    moments: list[float] = []
    ready = prepared(spec, tell=lambda _: moments.append(time.perf_counter()))
    captures, *_, measures = moments
    if not ready.as_it_is:
        raise OutOfMemory(f"{spec.title} does not fit on this machine as it is, so that there is nothing to compare")
    return measures - captures, time.perf_counter() - measures, ready


def _process_peak(call: Callable[[], Any]) -> int:
    """How far the process's high-water mark rises above its resident size before the call."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the mark of what ran before
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


COLUMNS = (
    "model", "ops", "capture s", "measure, in steps", "simulated peak", "allocator", "off by", "process", "off by",
    "sum of ops", "captured to eager", "quartiles",
)  # fmt: skip


def accuracy_cells(row: AccuracyRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    simulated, allocator, process = row.simulated_bytes, row.allocator_bytes, row.process_bytes
    return (
        row.model,
        f"{row.ops:,}",
        f"{row.capture_s:.1f}",
        f"{row.measure_in_steps:.1f}",
        human_bytes(simulated),
        human_bytes(allocator),
        f"{simulated / allocator - 1:+.2%}",
        human_bytes(process),
        f"{simulated / process - 1:+.1%}",
        f"{row.sum_of_ops:.2f}",
        f"{row.captured_to_eager:.3f}x",
        f"{row.captured_low:.3f}-{row.captured_high:.3f}",
    )


ACCURACY = Experiment(kind="accuracy", rows=(AccuracyRow,), table=line_by_line(COLUMNS, accuracy_cells))
