"""`python -m bench profile`: what a step is made of, as a table, CSV files and"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.prepared import prepared
from bench.show.axes import ROLE_NAMES
from bench.show.memory_figures import draw_memory_by_role
from bench.show.step_figures import (
    draw_largest,
    draw_peak_breakdown,
    draw_time_by_kind,
    largest_activations,
    time_by_kind,
)
from bench.show.tables import print_table
from bench.show.terminal import console, say
from bench.workloads.spec import WorkloadSpec
from planner.analysis import candidates, liveness
from planner.ir import Graph, Phase, Role
from planner.plan import recomputation
from planner.schedule import unplanned_schedule
from planner.simulator import Timeline, unplanned
from planner.units import human_bytes
from profiler.measuring.op_times import Measured


def run_profile(spec: WorkloadSpec, *, out: Path | None) -> Measured:
    """Measure one step, print what it is made of, and write files to `out`."""
    moments: list[float] = []

    def tell(text: str) -> None:
        say(text)
        moments.append(time.perf_counter())

    ready = prepared(spec, tell=tell, show_progress=True)
    capture_s, measure_s = moments[1] - moments[0], time.perf_counter() - moments[1]
    measured, graph = ready.measured, ready.graph
    timeline = unplanned(graph)
    _print_summary(graph, timeline)
    console.print(f"captured in {capture_s:.1f} s, measured in {measure_s:.1f} s ({graph.timing})")
    if reason := ready.traced.opaque_reason:
        console.print(f"the optimizer runs as itself, outside the graph: {reason}")
    if out is not None:
        write_files(out, measured)
        console.print(f"written to {out}: graph.json, node_stats.csv, activation_stats.csv and four figures")
    return measured


def _print_summary(graph: Graph, timeline: Timeline) -> None:
    print_table(f"{graph.name}: ops by phase", ("phase", "ops", "time", "of step", "made"), phase_rows(graph))
    rows = [
        (ROLE_NAMES[role], human_bytes(n), f"{n / timeline.peak_bytes:.0%}")
        for role, n in sorted(timeline.peak_by_role, key=lambda part: -part[1])
    ]
    peak = human_bytes(timeline.peak_bytes)
    above = human_bytes(timeline.above_start_bytes)
    print_table(
        f"{graph.name}: the peak of {peak}, {above} of it added by the step", ("role", "at the peak", "share"), rows
    )


def phase_rows(graph: Graph) -> list[tuple[str, ...]]:
    """Ops, time and bytes made, by phase."""
    rows: list[tuple[str, ...]] = []
    for phase in Phase:
        ops = [op for op in graph.ops if op.phase is phase]
        us = sum(op.time_us for op in ops)
        made = sum(graph.storages[s].nbytes for op in ops for s in graph.makes[op.id])
        share = f"{us / graph.time_us:.0%}" if graph.time_us else "-"
        rows.append((phase.value, f"{len(ops):,}", f"{us / 1e3:,.1f} ms", share, human_bytes(made)))
    return rows


# -- files --------------------------------------------------------------------------------------------------------


def write_files(out: Path, measured: Measured) -> None:
    """graph.json, two CSV files and four"""
    measured.graph.save(out / "graph.json")
    _write_csv(out / "node_stats.csv", NODE_COLUMNS, node_rows(measured))
    _write_csv(out / "activation_stats.csv", ACTIVATION_COLUMNS, activation_rows(measured.graph))
    draw_step(out, measured.graph)


def draw_step(out: Path, graph: Graph) -> list[Path]:
    """The four figures of a step, drawn from its graph alone."""
    schedule, timeline = unplanned_schedule(graph), unplanned(graph)
    names = ("peak_breakdown", "memory", "largest_activations", "time_by_kind")
    breakdown, memory, largest, kinds = paths = [out / f"{name}.png" for name in names]
    peak = human_bytes(timeline.peak_bytes)
    draw_peak_breakdown(breakdown, timeline, title=f"{graph.name}: what the peak of {peak} is")
    draw_memory_by_role(memory, graph, schedule, title=f"{graph.name}: memory over one step")
    draw_largest(largest, largest_activations(graph), title=f"{graph.name}: largest activations")
    draw_time_by_kind(kinds, time_by_kind(graph), title=f"{graph.name}: op time by kind, {graph.timing}")
    return paths


def _write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


NODE_COLUMNS = (
    "rank", "name", "target", "gtype", "round", "run_time_us", "spread_us", "before_bytes", "peak_mem_bytes",
    "active_mem_bytes", "output_bytes", "workspace_bytes", "rerun", "module", "source_line",
)  # fmt: skip


def node_rows(measured: Measured) -> Iterable[tuple[Any, ...]]:
    """One row per op, in the paper's words. `active_mem` is the memory while it runs less the idle activations."""
    graph = measured.graph
    idle = _idle_bytes(graph)
    for op, s in zip(graph.ops, measured.stats, strict=True):
        yield (
            op.id, op.name, op.target, op.phase.value, op.round, round(s.time_us, 3), round(s.spread_us, 3),
            s.before_bytes, s.peak_bytes, s.peak_bytes - idle[op.id], s.output_bytes, s.workspace_bytes,
            op.rerun.value, op.module_path, op.source_line,
        )  # fmt: skip


def _idle_bytes(graph: Graph) -> list[int]:
    """Per op: bytes of activations that lie idle while it runs."""
    idle = [0] * (len(graph.ops) + 1)
    for live in liveness(graph):
        if live.idle_after is not None and live.idle_until is not None:
            idle[live.idle_after + 1] += graph.storages[live.storage].nbytes
            idle[live.idle_until] -= graph.storages[live.storage].nbytes
    for t in range(1, len(idle)):
        idle[t] += idle[t - 1]
    return idle


ACTIVATION_COLUMNS = (
    "name", "module", "memory_size_bytes", "created_at", "last_fw_access", "first_bw_access", "last_bw_access",
    "inactive_time_us", "recomp_time_us", "recompute_ratio_bytes_per_us", "may_be_dropped",
)  # fmt: skip


def activation_rows(graph: Graph) -> Iterable[tuple[Any, ...]]:
    """One row per activation; `recomp_time` is from the other activations and the inputs, its own op included."""
    droppable = set(candidates(graph))
    names = [op.name for op in graph.ops]
    for storage in graph.storages:
        live = liveness(graph)[storage.id]
        if storage.role is not Role.ACTIVATION or live.created_at is None:
            continue
        us = recomputation(graph, storage.id, droppable.__contains__).time_us(graph)
        accesses = (live.created_at, live.last_fw_access, live.first_bw_access, live.last_bw_access)
        yield (
            graph.storage_names[storage.id], graph.ops[live.created_at].module_path, storage.nbytes,
            *("" if op is None else names[op] for op in accesses),
            round(live.inactive_us, 1), round(us, 3), round(storage.nbytes / us, 1) if us else "",
            "yes" if storage.id in droppable else "no",
        )  # fmt: skip
