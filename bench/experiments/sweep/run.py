"""`python -m bench --batches 4,8,16`: peak memory and latency against the batch size, with and without a plan.

Batches that do not fit on this machine are captured, planned and predicted from the largest one measured, and
marked so. Rows are saved after every batch, and a sweep that was interrupted goes on where it stopped.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import strategies
from bench.experiments.comparison.planned_steps import PROVEN_STEPS, run_comparison
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.prepared import captured, prepared
from bench.experiments.results_file import resumed_rows, save_rows
from bench.experiments.sweep.figures import draw_batch_latency, draw_batch_peaks
from bench.experiments.sweep.rows import COLUMNS, SweepRow, SweepSettings, sweep_cells
from bench.show.file_names import slug
from bench.show.terminal import console, stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.scaling import with_times_of
from planner.simulator import Timeline
from planner.solve import Problem, Solution, Status, solve_if_needed
from profiler.measuring.memory import OutOfMemory, guarded
from profiler.tracing.fake_tensors.without_memory import made_without_memory
from rewriter.memory_need import lack_of


def run_sweep(
    spec: WorkloadSpec,
    batches: Sequence[int],
    strategy: str,
    budget: str,
    *,
    pairs: int,
    time_limit_s: float,
    out: Path,
    json_file: Path | None = None,
) -> list[SweepRow]:
    """One row per batch size, a table and two figures."""
    settings = SweepSettings(
        **asdict(replace(spec, batch=None)), strategy=strategy, budget=budget, pairs=pairs, time_limit_s=time_limit_s
    )
    file = out / f"sweep_{slug(spec.title_of_all_batches)}_{slug(strategy)}_{slug(budget)}.json"
    done = {row.batch: row for row in resumed_rows(file, SWEEP, settings=settings)}
    if done:
        console.print(f"going on with {file}: batches {', '.join(map(str, sorted(done)))} are there")
    sweep = _Sweep(spec, settings)
    try:
        for batch in sorted(set(batches) - set(done)):
            done[batch] = sweep.row(batch, [row for row in done.values() if row.measured])
            save_rows(file, SWEEP, [done[b] for b in sorted(done)], settings=settings)
    except KeyboardInterrupt:
        console.print(f"{len(done)} rows are in {file}: the same command goes on from there")
        raise
    shown = [done[batch] for batch in sorted(set(batches))]
    _print(settings, shown)
    if json_file is not None:
        save_rows(json_file, SWEEP, shown, settings=settings)
    for path in draw_sweep(file, shown, settings):
        console.print(f"figure: {path}")
    return shown


def _print(settings: SweepSettings, rows: Sequence[SweepRow]) -> None:
    SWEEP.print(settings.title_of("peak and time"), rows)
    for row in rows:
        if not row.fits or row.note.startswith("nothing to do"):
            console.print(f"batch {row.batch}: {row.note}")


def draw_sweep(file: Path, rows: Sequence[SweepRow], settings: SweepSettings) -> list[Path]:
    """Peak and latency against the batch size, beside the file that holds the rows."""
    written = []
    for name, draw in (("peak", draw_batch_peaks), ("latency", draw_batch_latency)):
        path = file.with_name(f"{name}_{file.stem.removeprefix('sweep_')}.png")
        draw(path, rows, title=settings.title_of(name))
        written.append(path)
    return written


def _draw(results: Results[SweepRow]) -> list[Path]:
    return draw_sweep(results.path, results.rows, results.settings)


SWEEP = Experiment(
    kind="sweep", rows=(SweepRow,), table=line_by_line(COLUMNS, sweep_cells), draw=_draw, settings=SweepSettings
)


class _Sweep:
    """One kind of work at growing batch sizes; remembers the largest measured graph, and whether memory ran out."""

    def __init__(self, spec: WorkloadSpec, settings: SweepSettings) -> None:
        self.spec = spec
        self.settings = settings
        self.measured: Graph | None = None
        self.exhausted = ""

    def row(self, batch: int, measured_rows: Sequence[SweepRow]) -> SweepRow:
        """Run a batch that fits on this machine; plan and predict one that does not."""
        spec = self.spec.at_batch(batch)
        if not self.exhausted:
            try:
                with stage(f"{spec.title}: captured, to see whether it fits"):
                    graph, lack = guarded(f"making {spec.title}", lambda: _asked(spec))
                gc.collect()  # the model that was captured, before it is made again
                if lack:
                    return self._predicted_row(spec, graph, f"does not fit on this machine: {lack}", measured_rows)
                return self._measured_row(spec)
            except OutOfMemory as answer:
                self.exhausted = str(answer)
                console.print(f"batch {batch}: {answer}; it and larger ones are predicted")
        workload = made_without_memory(lambda _: spec.make(), batch)
        return self._predicted_row(spec, spec.capture(workload).graph, self.exhausted, measured_rows)

    def _measured_row(self, spec: WorkloadSpec) -> SweepRow:
        asked = self.settings
        found = run_comparison(
            spec, [asked.strategy], [asked.budget], pairs=asked.pairs, time_limit_s=asked.time_limit_s
        )
        if found.why_not_compared:  # what memory there is has changed meanwhile
            raise OutOfMemory(found.why_not_compared)
        self.measured = found.ready.graph
        row = found.rows[0]
        return _row(
            spec,
            found.solutions[0],
            measured=True,
            note=row.note,
            exact=row.exact,
            eager_s=row.eager_s,
            planned_s=row.planned_s,
            eager_peak_bytes=row.eager_peak_bytes,
            planned_peak_bytes=row.measured_peak_bytes,
        )

    def _predicted_row(self, spec: WorkloadSpec, graph: Graph, why: str, measured_rows: Sequence[SweepRow]) -> SweepRow:
        """Plan without running: op times and workspaces of the largest measured batch, scaled to this one."""
        asked, source = self.settings, self._largest_measured(measured_rows)
        if source is not None:
            graph = with_times_of(graph, source)
        problem = Problem.of(graph, asked.budget, time_limit_s=asked.time_limit_s)
        with stage(f"{spec.title}: planned, not run"):
            solution = solve_if_needed(problem, strategies.make(asked.strategy), label=asked.strategy)
        planned = solution.timeline if solution.status is Status.FITS else None
        step_to_ops = None if source is None else _step_to_ops(source, measured_rows)
        return _row(
            spec,
            solution,
            measured=False,
            why_predicted=why,
            note=solution.reason,
            exact=None,
            eager_s=None if step_to_ops is None else step_to_ops * problem.unplanned.time_us / 1e6,
            planned_s=None if step_to_ops is None or planned is None else step_to_ops * planned.time_us / 1e6,
            eager_peak_bytes=problem.unplanned.peak_bytes,
            planned_peak_bytes=None if planned is None else planned.peak_bytes,
        )

    def _largest_measured(self, measured_rows: Sequence[SweepRow]) -> Graph | None:
        """The largest batch measured in this run; after an interrupt it is measured anew."""
        if self.measured is None and measured_rows:
            self.measured = prepared(self.spec.at_batch(max(row.batch for row in measured_rows))).graph
        return self.measured


def _step_to_ops(measured: Graph, rows: Sequence[SweepRow]) -> float:
    """Seconds of the measured step to the sum of its ops, so that a prediction continues what was timed."""
    timed = next((row.eager_s for row in rows if row.model == measured.name), None)
    return float(timed / (measured.time_us / 1e6)) if timed and measured.time_us else 1.0


def _asked(spec: WorkloadSpec) -> tuple[Graph, str]:
    """The graph of a step, and why it cannot be run here ("" if it can); the model is let go."""
    gc.collect()  # the model of the batch before
    traced = captured(spec)
    return traced.graph, lack_of(traced, proven_steps=PROVEN_STEPS)


def _row(
    spec: WorkloadSpec,
    solution: Solution,
    *,
    measured: bool,
    note: str,
    exact: bool | None,
    eager_s: float | None,
    planned_s: float | None,
    eager_peak_bytes: int,
    planned_peak_bytes: int | None,
    why_predicted: str = "",
) -> SweepRow:
    base, planned = solution.problem.unplanned, solution.timeline
    return SweepRow(
        model=spec.title,
        batch=spec.batch_size,
        free_gradients=spec.free_gradients,
        early_updates=spec.early_updates,
        strategy=solution.strategy,
        status=solution.status,
        budget_bytes=solution.problem.budget_bytes,
        smallest_peak_bytes=None if planned is None else planned.peak_bytes,
        start_bytes=base.start_bytes,
        by_role_eager=_roles(base),
        by_role_planned=_roles(planned) if planned else {},
        predicted_overhead=solution.overhead,
        measured=measured,
        why_predicted=why_predicted,
        note=note,
        exact=exact,
        eager_s=eager_s,
        planned_s=planned_s,
        eager_peak_bytes=eager_peak_bytes,
        planned_peak_bytes=planned_peak_bytes,
    )


def _roles(timeline: Timeline) -> dict[str, int]:
    return {role.value: nbytes for role, nbytes in timeline.peak_by_role}
