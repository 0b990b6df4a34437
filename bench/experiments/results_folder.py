"""`python -m bench results`: tables and figures of the results folder, made again from the rows saved beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.machine.row_files import slug
from planner.errors import FileFormatError
from planner.ir import Graph
from planner.solve import Status

RESULTS = Path(__file__).parents[1] / "results"
ALONE = "ilp:seeds=false"

# Rows -> column titles and cells.
Table = Callable[[list[dict[str, Any]]], tuple[Sequence[str], list[Sequence[str]]]]
# The file of the rows and all that is in it -> the figures written beside it.
Drawer = Callable[[Path, dict[str, Any]], list[Path]]


def make_tables(folder: Path = RESULTS) -> list[Path]:
    """Write KIND_NAME.md, and figures where the kind has any, for every KIND_NAME.json in `folder`.

    A folder in it with a graph.json, as `profile` leaves them, gets the figures of that step and of a plan for it.
    """
    written: list[Path] = []
    for source in sorted(folder.glob("*.json")):
        kind = source.stem if source.stem in _makers() else source.stem.partition("_")[0]
        maker = _makers().get(kind)
        if maker is None:
            raise FileFormatError(f"{source}: no table is known for it; there are {', '.join(_makers())}")
        document = json.loads(source.read_text(encoding="utf-8"))
        columns, rows = maker(document["rows"])
        target = source.with_suffix(".md")
        page = _page(source.stem, document, columns, rows) + _further(kind, source, document["rows"])
        target.write_text(page, encoding="utf-8")
        written.append(target)
        if kind in _drawers():
            written += _drawers()[kind](source, document)
    return [*written, *_draw_steps(folder)]


def _draw_steps(folder: Path) -> list[Path]:
    from bench.experiments.profiling import draw_step

    written: list[Path] = []
    for file in sorted(folder.glob("*/graph.json")):
        graph = Graph.load(file)
        written += [*draw_step(file.parent, graph), *_draw_planned(file.parent, graph)]
    return written


def _draw_planned(out: Path, graph: Graph, strategy: str = "mutwo", budget: str = "50%") -> list[Path]:
    """Before and after on one axis, and the plan; none where the budget cannot be met."""
    from bench.experiments.planning import compare_graph
    from bench.show.pages import write_planned

    (row,) = compare_graph(graph, [strategy], [budget], time_limit_s=10.0)
    if row.solution.status is not Status.FITS:
        return []
    return write_planned(out, [(f"{strategy}, {budget}", row.solution)], suffix=f"_{strategy}_{slug(budget)}")


def _makers() -> dict[str, Table]:
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


def _drawers() -> dict[str, Drawer]:
    return {"calibration": _draw_calibration, "compare": _draw_compare, "pareto": _draw_pareto, "sweep": _draw_sweep}


def _compare(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.contenders import COLUMNS, contender_cells, contenders

    return COLUMNS, [contender_cells(c) for c in contenders(rows)]


def _draw_compare(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.contenders import contenders, draw_contenders

    rows, path = document["rows"], source.with_suffix(".png")
    draw_contenders(path, contenders(rows), title=f"{rows[0]['model']}: time against memory")
    return [path]


def _scaled(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.scaled import COLUMNS, scaled_cells

    return COLUMNS, [scaled_cells(row) for row in rows]


def _sweep(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.sweep import COLUMNS, sweep_cells

    return COLUMNS, [sweep_cells(row) for row in rows]


def _draw_sweep(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.sweep import draw_sweep

    return draw_sweep(source, document["rows"], document["settings"])


def _accuracy(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.accuracy import COLUMNS, accuracy_cells

    return COLUMNS, [accuracy_cells(row) for row in rows]


def _calibration(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.calibration import COLUMNS, calibration_cells

    return COLUMNS, [calibration_cells(row) for row in rows]


def _draw_calibration(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.calibration import draw_points

    return draw_points(source.with_suffix(".png"), document["rows"])


def _pareto(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.experiments.pareto import from_data, overhead_table

    columns, lines = overhead_table(from_data(rows))
    return columns, [*lines]


def _draw_pareto(source: Path, document: dict[str, Any]) -> list[Path]:
    from bench.experiments.pareto import from_data
    from bench.show.trade_off_figure import draw_trade_off

    path = source.with_suffix(".png")
    draw_trade_off(path, from_data(document["rows"]))
    return [path]


def _further(kind: str, source: Path, rows: list[dict[str, Any]]) -> str:
    """What stands below the first table: other tables of the same rows, and their figures."""
    makers = {"calibration": _further_calibration, "pareto": _further_pareto}
    return makers[kind](source, rows) if kind in makers else ""


def _further_pareto(source: Path, rows: list[dict[str, Any]]) -> str:
    from bench.experiments.pareto import caption, from_data

    curve = from_data(rows)
    return f"\n{caption(curve)}\n\n![{curve.graph}: extra time against peak memory]({source.stem}.png)\n"


def _further_calibration(source: Path, rows: list[dict[str, Any]]) -> str:
    from bench.experiments.calibration import READING, more_tables, summary

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
    from bench.experiments.smallest import COLUMNS, smallest_cells

    return COLUMNS, [smallest_cells(row) for row in rows]


def _page(name: str, document: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    machine, versions = document["machine"], document["versions"]
    torch, title = versions.get("torch", "?"), name.replace("_", " ").capitalize()
    head = (
        f"# {title}\n\nMade by `{document['command']}` at commit {document['commit']} on {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; torch {torch}, Python {versions['python']}.\n\n"
    )
    return head + markdown(columns, rows) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
