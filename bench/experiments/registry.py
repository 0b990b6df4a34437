"""Every kind of results file, and how its rows become a table, further sections and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.show.tables import markdown

ALONE = "ilp:seeds=false"

# Rows -> column titles and cells.
Table = Callable[[list[dict[str, Any]]], tuple[Sequence[str], list[Sequence[str]]]]
# The file of the rows and all that is in it -> the figures written beside it.
Drawer = Callable[[Path, dict[str, Any]], list[Path]]


def tables() -> dict[str, Table]:
    return {
        "accuracy": _accuracy,
        "calibration": _calibration,
        "compare": _compare,
        "exactness": _exactness,
        "large": _large,
        "pareto": _pareto,
        "plans": _plans,
        "plans_smallest": _smallest,
        "scaled": _scaled,
        "sweep": _sweep,
    }


def drawers() -> dict[str, Drawer]:
    return {"calibration": _draw_calibration, "compare": _draw_compare, "pareto": _draw_pareto, "sweep": _draw_sweep}


def _compare(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.comparison.side_by_side import COLUMNS, contender_cells, contenders

    return COLUMNS, [contender_cells(c) for c in contenders(rows)]


def _draw_compare(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.comparison.side_by_side import contenders, draw_contenders

    rows, path = document["rows"], source.with_suffix(".png")
    draw_contenders(path, contenders(rows), title=f"{rows[0]['model']}: time against memory")
    return [path]


def _scaled(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.scaled import COLUMNS, scaled_cells

    return COLUMNS, [scaled_cells(row) for row in rows]


def _sweep(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.sweep.run import COLUMNS, sweep_cells

    return COLUMNS, [sweep_cells(row) for row in rows]


def _draw_sweep(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.sweep.run import draw_sweep

    return draw_sweep(source, document["rows"], document["settings"])


def _accuracy(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.accuracy import COLUMNS, accuracy_cells

    return COLUMNS, [accuracy_cells(row) for row in rows]


def _calibration(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.calibration.rows import COLUMNS, calibration_cells

    return COLUMNS, [calibration_cells(row) for row in rows]


def _draw_calibration(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.calibration.figure import draw_points

    return draw_points(source.with_suffix(".png"), document["rows"])


def _pareto(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.pareto.rows import from_data, overhead_table

    columns, lines = overhead_table(from_data(rows))
    return columns, [*lines]


def _draw_pareto(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.pareto.figure import draw_trade_off
    from bench.experiments.pareto.rows import from_data

    path = source.with_suffix(".png")
    draw_trade_off(path, from_data(document["rows"]))
    return [path]


def further(kind: str, source: Path, rows: list[dict[str, Any]]) -> str:
    """What stands below the first table: other tables of the same rows, and their figures."""
    makers = {"calibration": _further_calibration, "pareto": _further_pareto}
    return makers[kind](source, rows) if kind in makers else ""


def _further_pareto(source: Path, rows: list[dict[str, Any]]) -> str:
    from bench.experiments.pareto.rows import caption, from_data

    curve = from_data(rows)
    return f"\n{caption(curve)}\n\n![{curve.graph}: extra time against peak memory]({source.stem}.png)\n"


def _further_calibration(source: Path, rows: list[dict[str, Any]]) -> str:
    from bench.experiments.calibration.rows import READING, more_tables, summary

    sections = [f"\n{summary(rows)}\n\n{READING}\n"]
    sections += [f"\n## {title}\n\n{markdown(columns, cells)}\n" for title, columns, cells in more_tables(rows)]
    return "".join([*sections, f"\n![estimated against measured op times]({source.stem}.png)\n"])


def _exactness(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.exactness import matrix

    return matrix(rows)


def _large(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.large import COLUMNS, large_cells

    return COLUMNS, [large_cells(row) for row in rows]


PLANS_COLUMNS = (
    "graph", "budget", "strategy", "status", "peak of step", "overhead", "gap", "seconds", "CPU seconds", "who won",
    "MILP alone",
)  # fmt: skip


def _plans(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """`ilp:seeds=false` has no line of its own: it says, beside `ilp`, what the program reached alone."""
    alone = {(row["graph"], row["budget"]): row for row in rows if row["strategy"] == ALONE}
    shown = [row for row in rows if row["strategy"] != ALONE]
    return PLANS_COLUMNS, [_plans_cells(row, alone.get((row["graph"], row["budget"]))) for row in shown]


def _plans_cells(row: dict[str, Any], alone: dict[str, Any] | None) -> tuple[str, ...]:
    peak, step = row["peak_bytes"], row["unplanned_peak_bytes"] - row["start_bytes"]
    return (
        row["graph"],
        row["budget"],
        row["strategy"],
        row["status"],
        "-" if peak is None else f"{(peak - row['start_bytes']) / step:.1%}",
        "-" if row["overhead"] is None else f"{row['overhead']:.2%}",
        "-" if row["gap"] is None else f"{row['gap']:.2%}",
        f"{row['solve_s']:.2f}",
        f"{row['solve_cpu_s']:.2f}",
        row["found_by"] or "-",
        "-" if row["strategy"] != "ilp" or alone is None else _alone(alone),
    )


def _alone(row: dict[str, Any]) -> str:
    if row["gap"] is None:
        return f"{row['status']}, {row['solve_cpu_s']:.1f} CPU s"
    return f"{row['overhead']:.2%}, gap {row['gap']:.2%}, {row['solve_cpu_s']:.1f} CPU s"


def _smallest(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.plans.smallest_budgets import COLUMNS, smallest_cells

    return COLUMNS, [smallest_cells(row) for row in rows]
