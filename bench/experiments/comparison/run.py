"""`python -m bench` on a model: run the comparison, show the table, draw memory over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.experiments.comparison.peers import peer_rows, print_peers
from bench.experiments.comparison.planned_steps import Comparison, run_comparison
from bench.experiments.comparison.rows import PLANNED_COLUMNS, PeerRow, PlannedRow, planned_cells
from bench.experiments.comparison.side_by_side import COMPARISON
from bench.experiments.results_file import save_rows
from bench.show.exports import write_planned
from bench.show.file_names import slug
from bench.show.tables import print_table
from bench.show.terminal import console
from bench.workloads.spec import WorkloadSpec
from planner.solve import Status
from planner.units import human_bytes
from rewriter.moving import HostAccess


def compare_model(
    spec: WorkloadSpec,
    strategy_specs: Sequence[str],
    budgets: Sequence[str],
    *,
    pairs: int,
    time_limit_s: float,
    out: Path,
    json_file: Path | None,
    peers: Sequence[str],
    access: HostAccess | None = None,
) -> Comparison:
    """One table of every strategy at every budget, one of what else there is, and a figure of memory per budget."""
    found = run_comparison(spec, strategy_specs, budgets, pairs=pairs, time_limit_s=time_limit_s, access=access)
    _print(spec, found, pairs)
    _save(json_file, found.rows)
    if peers:
        others: list[PeerRow] = []
        for row in peer_rows(spec.plain, peers, pairs=pairs):
            others.append(row)
            _save(json_file, [*found.rows, *others])  # a peer takes minutes: what is there stays
        print_peers(spec.plain, others, pairs=pairs)
    for path in _draw(out, found, budgets):
        console.print(f"written: {path}")
    return found


def _save(json_file: Path | None, rows: Sequence[PlannedRow | PeerRow]) -> None:
    if json_file is not None:
        save_rows(json_file, COMPARISON, rows)


def _print(spec: WorkloadSpec, found: Comparison, pairs: int) -> None:
    first = found.rows[0]
    peak, above = human_bytes(first.eager_peak_bytes), human_bytes(first.eager_peak_bytes - first.start_bytes)
    pace = "" if first.eager_s is None else f"; {first.eager_s:.2f} s a step"
    how = f" (predicted; {found.why_not_compared})" if found.why_not_compared else ""
    caption = (
        f"Eager: peak {peak}, {above} of it added by the step{pace}{how}. "
        "Peaks are of all live tensors; 'of eager's step' is what the step adds, planned to eager. Times are ratios "
        f"to eager, medians of {pairs} rounds in turn. 'exact': every loss, gradient, parameter, buffer, optimizer "
        "state and generator is equal to eager's, to the bit."
    )
    if spec.liberties:
        caption += f" Planned with {' and '.join(spec.liberties)}; eager is the plain step."
    if spec.free_gradients:
        caption += " Gradients are gone when a planned step ends, so 'exact' leaves them out; the rest is compared."
    print_table(
        f"{spec.title}: planned against eager", PLANNED_COLUMNS, [planned_cells(r) for r in found.rows], caption=caption
    )
    for line in remarks(found):
        console.print(line)


def remarks(found: Comparison) -> list[str]:
    """What the table cannot say: why a row has no measured step, and budgets that ask for nothing."""
    lines: list[str] = []
    for row, solution in zip(found.rows, found.solutions, strict=True):
        told = (solution.reason, found.why_not_compared)
        went_wrong = row.note not in told and row.exact is not False  # the table shows what is not exact
        if row.status is not Status.FITS or went_wrong:
            lines.append(f"{row.strategy} at {row.budget}: {row.note}")
        elif solution.problem.unplanned.peak_bytes <= solution.problem.budget_bytes:
            lines.append(f"budget {row.budget}: {solution.reason}")
        if row.moved_bytes:
            lines.append(f"{row.strategy} at {row.budget}: {moves(row)}")
    return list(dict.fromkeys(lines))


def moves(row: PlannedRow) -> str:
    """What a step moves to the host, and how long it waits for that, as predicted and as measured."""
    size, expected = human_bytes(row.moved_bytes or 0), 1e3 * (row.predicted_stall_s or 0.0)
    seen = "not measured" if row.measured_stall_s is None else f"{1e3 * row.measured_stall_s:.1f} ms measured"
    return f"moves {size} a step to the host and back, and waits {expected:.1f} ms for it as predicted, {seen}"


def _draw(out: Path, found: Comparison, budgets: Sequence[str]) -> list[Path]:
    """Per budget: memory over time of the first three that fit, and the plan of the best as a figure and as text."""
    paths = list[Path]()
    for budget in budgets:
        pairs = zip(found.rows, found.solutions, strict=True)
        fitting = [(r.strategy, s) for r, s in pairs if r.budget == budget and s.status is Status.FITS]
        if fitting:
            paths += write_planned(out, fitting, suffix=f"_{slug(budget)}")
    return paths
