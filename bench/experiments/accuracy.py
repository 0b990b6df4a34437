"""`python -m bench accuracy`: the simulated peak and the op times against two independent meters.

Each model runs in a fresh process of its own, because the high-water mark of one that already ran something
says nothing, and with an allocator that gives memory back.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.experiments.results_file import save_rows
from bench.machine.clock import clock_for, gradients_put_back, spread
from bench.machine.separate_process import in_separate_process
from bench.show.tables import print_table
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError
from planner.schedule import unplanned_schedule
from planner.simulator import unplanned
from planner.units import human_bytes
from profiler.measuring.meters import meter_for, peak_above_start
from profiler.measuring.op_times import measure
from profiler.tracing.whole_step import capture
from rewriter.replay import apply

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


def run_accuracy(specs: Sequence[WorkloadSpec], *, pairs: int, out: Path | None) -> list[dict[str, Any]]:
    """Measure each in a process of its own, print the table, and save the rows to `out`."""
    rows = []
    for spec in specs:
        if spec.device != "cpu":
            raise PlannerError(
                f"accuracy on {spec.device}: one of its meters is the process's own memory, which holds no GPU tensor; "
                "leave out --device, or use `python -m bench verify` for predicted against measured peaks"
            )
    for spec in specs:
        with stage(f"measuring {spec.title} in a fresh process"):
            rows.append(asdict(in_separate_process(measure_accuracy, spec, pairs, what=spec.title, env=GIVING_BACK)))
        print_table("Accuracy so far", COLUMNS, [accuracy_cells(row) for row in rows])
        if out is not None:
            save_rows(out, rows=rows)
    return rows


def measure_accuracy(spec: WorkloadSpec, pairs: int) -> AccuracyRow:
    """Everything about one model, in this process."""
    step, model, optimizer, batch = spec.make()
    clock = clock_for(model)
    capture_s, traced = clock.timed(lambda: capture(step, model, optimizer, batch, name=spec.title))
    measure_s, measured = clock.timed(lambda: measure(traced, batch, show_progress=False))
    graph = measured.graph
    module = apply(measured.traced, unplanned_schedule(graph))
    meter, put_back = meter_for(next(model.parameters()).device), gradients_put_back(traced)

    def captured() -> Any:
        return traced.convention.call(module, batch)

    def eager() -> Any:
        return step(model, optimizer, batch)

    def from_clean(read: Callable[[Callable[[], Any]], int], call: Callable[[], Any]) -> int:
        for p in model.parameters():
            p.grad = None
        put_back()
        gc.collect()
        return read(call)

    captured()
    process = from_clean(_process_peak, captured)
    allocator = from_clean(lambda call: peak_above_start(meter, call), captured)
    eager_allocator = from_clean(lambda call: peak_above_start(meter, call), eager)
    eager_times, captured_times = [], []
    for _ in range(pairs):
        put_back()
        eager_times.append(clock.seconds(eager))
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


def accuracy_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    simulated, allocator, process = row["simulated_bytes"], row["allocator_bytes"], row["process_bytes"]
    return (
        row["model"],
        f"{row['ops']:,}",
        f"{row['capture_s']:.1f}",
        f"{row['measure_in_steps']:.1f}",
        human_bytes(simulated),
        human_bytes(allocator),
        f"{simulated / allocator - 1:+.2%}",
        human_bytes(process),
        f"{simulated / process - 1:+.1%}",
        f"{row['sum_of_ops']:.2f}",
        f"{row['captured_to_eager']:.3f}x",
        f"{row['captured_low']:.3f}-{row['captured_high']:.3f}",
    )
