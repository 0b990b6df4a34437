"""`python -m bench large`: models far too large for this machine, captured without memory and planned.

Each one has a fresh process, so that its high-water mark is its own.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import strategies
from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.results_file import save_rows
from bench.machine.separate_process import in_separate_process
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.solve import Problem, Status, solve
from planner.units import human_bytes
from profiler.estimating.devices import find_device
from profiler.estimating.roofline import estimated
from profiler.tracing.whole_step import capture_without_memory
from profiler.workload import Workload

MODELS = (
    WorkloadSpec(model="bert-large", batch=32, seq=512),
    WorkloadSpec(model="gpt2-xl", batch=8, seq=1024),
    WorkloadSpec(model="vit-l", batch=64),
    WorkloadSpec(model="resnet152", batch=256),
)
DEVICE = "A100-80"
BUDGET = "50%"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeRow:
    """One model. Peaks and times are estimated for `device`; seconds and process memory are of this machine."""

    model: str
    device: str
    ops: int
    parameters: int
    capture_s: float
    capture_cpu_s: float
    start_bytes: int
    unplanned_peak_bytes: int
    budget: str
    status: Status
    planned_peak_bytes: int | None
    overhead: float | None
    gap: float | None
    plan_s: float
    process_bytes: int


def run_large(specs: Sequence[WorkloadSpec], *, time_limit_s: float, out: Path | None) -> list[LargeRow]:
    """Each in a process of its own; prints the table and saves the rows to `out`."""
    rows: list[LargeRow] = []
    for spec in specs:
        with stage(f"capturing and planning {spec.title} in a fresh process"):
            rows.append(in_separate_process(measure_large, spec, time_limit_s, what=spec.title))
        LARGE.print("Large models so far", rows)
        if out is not None:
            save_rows(out, LARGE, rows)
    return rows


def measure_large(spec: WorkloadSpec, time_limit_s: float) -> LargeRow:
    """Capture and plan one model, in this process."""
    device = find_device(DEVICE)

    def make(batch: int) -> Workload:
        return spec.at_batch(batch).make()

    started, started_cpu = time.perf_counter(), time.process_time()
    step = capture_without_memory(make, spec.batch_size, name=spec.title, target=device.target)
    capture_s, capture_cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    graph = estimated(step, device)
    problem = Problem.of(graph, BUDGET, time_limit_s=time_limit_s)
    found = solve(problem, strategies.make(f"auto:seconds={time_limit_s}"))
    return LargeRow(
        model=spec.title,
        device=device.name,
        ops=len(graph.ops),
        parameters=sum(p.numel() for p in step.convention.model.parameters()),
        capture_s=capture_s,
        capture_cpu_s=capture_cpu_s,
        start_bytes=graph.start_bytes,
        unplanned_peak_bytes=problem.unplanned.peak_bytes,
        budget=BUDGET,
        status=found.status,
        planned_peak_bytes=None if found.timeline is None else found.timeline.peak_bytes,
        overhead=found.overhead,
        gap=found.gap,
        plan_s=found.solve_s,
        process_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


COLUMNS = (
    "model", "parameters", "ops", "made and captured, s", "CPU s", "unplanned peak", "planned at", "peak", "more time",
    "proven gap", "plan s", "process memory", "estimated for",
)  # fmt: skip


def large_cells(row: LargeRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    peak = row.planned_peak_bytes
    return (
        row.model,
        f"{row.parameters / 1e6:,.0f} M",
        f"{row.ops:,}",
        f"{row.capture_s:.1f}",
        f"{row.capture_cpu_s:.1f}",
        human_bytes(row.unplanned_peak_bytes),
        f"{row.budget}: {row.status.value}",
        "-" if peak is None else human_bytes(peak),
        "-" if row.overhead is None else f"{row.overhead:.1%}",
        "-" if row.gap is None else f"{row.gap:.1%}",
        f"{row.plan_s:.1f}",
        human_bytes(row.process_bytes),
        row.device,
    )


LARGE = Experiment(kind="large", rows=(LargeRow,), table=line_by_line(COLUMNS, large_cells))
