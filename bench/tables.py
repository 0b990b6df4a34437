"""`python -m bench results`: the tables of the results folder, made again from the rows saved beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.errors import FileFormatError

RESULTS = Path(__file__).parent / "results"
ALONE = "ilp:seeds=false"

# Rows -> column titles and cells.
Table = Callable[[list[dict[str, Any]]], tuple[Sequence[str], list[Sequence[str]]]]


def make_tables(folder: Path = RESULTS) -> list[Path]:
    """Write NAME.md for every NAME.json in `folder` that we know how to show."""
    written = []
    for source in sorted(folder.glob("*.json")):
        maker = _makers().get(source.stem)
        if maker is None:
            raise FileFormatError(f"{source}: no table is known for it; there are {', '.join(_makers())}")
        document = json.loads(source.read_text(encoding="utf-8"))
        columns, rows = maker(document["rows"])
        target = source.with_suffix(".md")
        target.write_text(_page(source.stem, document, columns, rows), encoding="utf-8")
        written.append(target)
    return written


def _makers() -> dict[str, Table]:
    return {"accuracy": _accuracy, "exactness": _exactness, "plans": _plans, "plans_smallest": _smallest}


def _accuracy(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.accuracy import COLUMNS, accuracy_cells

    return COLUMNS, [accuracy_cells(row) for row in rows]


def _exactness(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.exactness import matrix

    return matrix(rows)


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
    from bench.smallest import COLUMNS, smallest_cells

    return COLUMNS, [smallest_cells(row) for row in rows]


def _page(name: str, document: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    machine, versions = document["machine"], document["versions"]
    torch = versions.get("torch", "?")
    title = name.capitalize().replace("_", ", ")
    head = (
        f"# {title}\n\nMade by `{document['command']}` at commit {document['commit']} on {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; torch {torch}, Python {versions['python']}.\n\n"
    )
    return head + markdown(columns, rows) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
