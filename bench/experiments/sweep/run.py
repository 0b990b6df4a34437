"""`python -m bench --batches 4,8,16`: peak memory and latency against the batch size, with and without a plan.

Batches that do not fit on this machine are captured, planned and predicted from the largest one measured, and
marked so. Rows are saved after every batch, and a sweep that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import strategies
from bench.experiments.comparison.planned_steps import PROVEN_STEPS, run_comparison
from bench.experiments.results_file import resumed_rows, save_rows
from bench.experiments.sweep.figures import draw_batch_latency, draw_batch_peaks
from bench.machine.memory_need import lack_of
from bench.show.file_names import slug
from bench.show.tables import print_table
from bench.show.terminal import console, stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.scaling import with_times_of
from planner.simulator import Timeline
from planner.solve import Problem, Solution, Status, solve_if_needed
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory, guarded
from profiler.measuring.op_times import measure
from profiler.tracing.without_memory import made_without_memory


def run_sweep(
    spec: WorkloadSpec,
    batches: Sequence[int],
    strategy_spec: str,
    budget: str,
    *,
    pairs: int,
    time_limit_s: float,
    out: Path,
    json_file: Path | None = None,
) -> list[dict[str, Any]]:
    """One row per batch size, a table and two figures."""
    sweep = _Sweep(spec, strategy_spec, budget, pairs=pairs, time_limit_s=time_limit_s)
    file = out / f"sweep_{slug(spec.title_of_all_batches)}_{slug(strategy_spec)}_{slug(budget)}.json"
    rows = resumed_rows(file, settings=sweep.settings)
    done = {row["batch"]: row for row in rows}
    if done:
        console.print(f"going on with {file}: batches {', '.join(map(str, sorted(done)))} are there")
    try:
        for batch in sorted(set(batches) - set(done)):
            done[batch] = sweep.row(batch, [row for row in done.values() if row["measured"]])
            rows = [done[b] for b in sorted(done)]
            save_rows(file, rows=rows, settings=sweep.settings)
    except KeyboardInterrupt:
        console.print(f"{len(done)} rows are in {file}: the same command goes on from there")
        raise
    shown = [done[batch] for batch in sorted(set(batches))]
    _print(_title(sweep.settings, "peak and time"), shown)
    if json_file is not None:
        save_rows(json_file, rows=shown, settings=sweep.settings)
    for path in draw_sweep(file, shown, sweep.settings):
        console.print(f"figure: {path}")
    return shown


def draw_sweep(file: Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[Path]:
    """Peak and latency against the batch size, beside the file that holds the rows."""
    written = []
    for name, draw in (("peak", draw_batch_peaks), ("latency", draw_batch_latency)):
        path = file.with_name(f"{file.stem.replace('sweep', name)}.png")
        draw(path, rows, title=_title(settings, name))
        written.append(path)
    return written


def _title(settings: dict[str, Any], what: str) -> str:
    fields = WorkloadSpec.__dataclass_fields__
    spec = WorkloadSpec(**{name: value for name, value in settings.items() if name in fields})
    return f"{spec.title_of_all_batches}: {what} against batch size, {settings['strategy']} at {settings['budget']}"


class _Sweep:
    """One kind of work at growing batch sizes; remembers the largest measured graph, and whether memory ran out."""

    def __init__(self, spec: WorkloadSpec, strategy_spec: str, budget: str, *, pairs: int, time_limit_s: float) -> None:
        self.spec = spec
        self.strategy_spec = strategy_spec
        self.budget = budget
        self.pairs = pairs
        self.time_limit_s = time_limit_s
        self.measured: Graph | None = None
        self.exhausted = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What all rows of one file have in common."""
        return {
            **asdict(replace(self.spec, batch=None)),
            "strategy": self.strategy_spec,
            "budget": self.budget,
            "pairs": self.pairs,
            "time_limit_s": self.time_limit_s,
        }

    def row(self, batch: int, measured_rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Run a batch that fits on this machine; plan and predict one that does not."""
        spec = replace(self.spec, batch=batch)
        if not self.exhausted:
            try:
                with stage(f"{spec.title}: captured, to see whether it fits"):
                    graph, lack = guarded(f"making {spec.title}", lambda: captured(spec))
                gc.collect()  # the model that was captured, before it is made again
                if lack:
                    return self._predicted_row(spec, graph, f"does not fit on this machine: {lack}", measured_rows)
                return self._measured_row(spec)
            except OutOfMemory as answer:
                self.exhausted = str(answer)
                console.print(f"batch {batch}: {answer}; it and larger ones are predicted")
        workload = made_without_memory(lambda _: spec.make(), batch)
        return self._predicted_row(spec, spec.capture(workload).graph, self.exhausted, measured_rows)

    def _measured_row(self, spec: WorkloadSpec) -> dict[str, Any]:
        found = run_comparison(
            spec, [self.strategy_spec], [self.budget], pairs=self.pairs, time_limit_s=self.time_limit_s
        )
        self.measured = found.measured.graph
        row = found.rows[0]
        return {
            **_common(spec, found.solutions[0]),
            "measured": True,
            "why_predicted": "",
            "note": row.note,
            "exact": row.exact,
            "eager_s": row.eager_s,
            "planned_s": row.planned_s,
            "eager_peak_bytes": row.eager_peak_bytes,
            "planned_peak_bytes": row.measured_peak_bytes,
        }

    def _predicted_row(
        self, spec: WorkloadSpec, graph: Graph, why: str, measured_rows: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Plan without running: op times and workspaces of the largest measured batch, scaled to this one."""
        source = self._largest_measured(measured_rows)
        if source is not None:
            graph = with_times_of(graph, source)
        problem = Problem.of(graph, self.budget, time_limit_s=self.time_limit_s)
        unplanned = problem.unplanned
        with stage(f"{spec.title}: planned, not run"):
            solution = solve_if_needed(problem, strategies.make(self.strategy_spec), label=self.strategy_spec)
        planned = solution.timeline if solution.status is Status.FITS else None
        step_to_ops = None if source is None else _step_to_ops(source, measured_rows)
        return {
            **_common(spec, solution),
            "measured": False,
            "why_predicted": why,
            "note": solution.reason,
            "exact": None,
            "eager_s": None if step_to_ops is None else step_to_ops * unplanned.time_us / 1e6,
            "planned_s": None if step_to_ops is None or planned is None else step_to_ops * planned.time_us / 1e6,
            "eager_peak_bytes": unplanned.peak_bytes,
            "planned_peak_bytes": None if planned is None else planned.peak_bytes,
        }

    def _largest_measured(self, measured_rows: Sequence[dict[str, Any]]) -> Graph | None:
        """The largest batch measured in this run; after an interrupt it is measured anew."""
        if self.measured is None and measured_rows:
            spec = replace(self.spec, batch=max(row["batch"] for row in measured_rows))
            workload = spec.make()
            self.measured = measure(spec.capture(workload), workload[3], show_progress=False).graph
        return self.measured


def _step_to_ops(measured: Graph, rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of the measured step to the sum of its ops, so that a prediction continues what was timed."""
    timed = next((row["eager_s"] for row in rows if row["model"] == measured.name), None)
    return float(timed / (measured.time_us / 1e6)) if timed and measured.time_us else 1.0


def captured(spec: WorkloadSpec) -> tuple[Graph, str]:
    """The graph of a step, and why it cannot be run here ("" if it can); the model is let go."""
    gc.collect()  # the model of the batch before
    traced = spec.capture(spec.make())
    return traced.graph, lack_of(traced, proven_steps=PROVEN_STEPS)


def _common(spec: WorkloadSpec, solution: Solution) -> dict[str, Any]:
    base, planned = solution.problem.unplanned, solution.timeline
    return {
        "model": spec.title,
        "batch": spec.batch_size,
        "free_gradients": spec.free_gradients,
        "early_updates": spec.early_updates,
        "strategy": solution.strategy,
        "status": solution.status.value,
        "budget_bytes": solution.problem.budget_bytes,
        "smallest_peak_bytes": None if planned is None else planned.peak_bytes,  # that was found, fitting or not
        "start_bytes": base.start_bytes,
        "by_role_eager": _roles(base),
        "by_role_planned": _roles(planned) if planned else {},
        "predicted_overhead": solution.overhead,
    }


def _roles(timeline: Timeline) -> dict[str, int]:
    return {role.value: nbytes for role, nbytes in timeline.peak_by_role}


COLUMNS = ("batch", "peak eager", "planned", "less by", "step eager", "planned", "time ratio", "exact", "how")


def _print(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print_table(title, COLUMNS, [sweep_cells(row) for row in rows])
    for row in rows:
        if row["status"] != Status.FITS.value or row["note"].startswith("nothing to do"):
            console.print(f"batch {row['batch']}: {row['note']}")


def sweep_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    eager, planned = row["eager_peak_bytes"], row["planned_peak_bytes"]
    eager_s, planned_s = row["eager_s"], row["planned_s"]
    return (
        str(row["batch"]),
        human_bytes(eager),
        _planned_peak(row),
        "-" if planned is None else f"{1 - planned / eager:.0%}",
        "-" if eager_s is None else f"{eager_s:.2f} s",
        "-" if planned_s is None else f"{planned_s:.2f} s",
        "-" if eager_s is None or planned_s is None else f"{planned_s / eager_s:.2f}x",
        "-" if row["exact"] is None else ("yes" if row["exact"] else "NO"),
        "measured" if row["measured"] else f"predicted: {row['why_predicted']}",
    )


def _planned_peak(row: dict[str, Any]) -> str:
    """The planned peak; where none fits the status, and the smallest peak that was found."""
    planned, smallest = row["planned_peak_bytes"], row["smallest_peak_bytes"]
    if row["status"] == Status.FITS.value:
        return "-" if planned is None else human_bytes(planned)
    return row["status"] if smallest is None else f"{row['status']}: smallest found {human_bytes(smallest)}"
