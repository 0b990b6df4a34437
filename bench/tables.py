"""`python -m bench results`: the tables of the results folder, made again from the rows saved beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.errors import FileFormatError

RESULTS = Path(__file__).parent / "results"

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
        page = _page(source.stem, document, columns, rows) + _further(source, document["rows"])
        target.write_text(page, encoding="utf-8")
        written.append(target)
    return written


def _makers() -> dict[str, Table]:
    return {"accuracy": _accuracy, "calibration": _calibration, "exactness": _exactness, "plans": _plans}


def _accuracy(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.accuracy import COLUMNS, accuracy_cells

    return COLUMNS, [accuracy_cells(row) for row in rows]


def _calibration(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.calibration import COLUMNS, calibration_cells

    return COLUMNS, [calibration_cells(row) for row in rows]


def _further(source: Path, rows: list[dict[str, Any]]) -> str:
    """What stands below the first table: other tables of the same rows, and their figure."""
    if source.stem != "calibration":
        return ""
    from bench.calibration import READING, more_tables, summary

    sections = [f"\n{summary(rows)}\n\n{READING}\n"]
    sections += [f"\n## {title}\n\n{markdown(columns, cells)}\n" for title, columns, cells in more_tables(rows)]
    return "".join([*sections, f"\n![estimated against measured op times]({source.stem}.png)\n"])


def _exactness(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    from bench.exactness import matrix

    return matrix(rows)


def _plans(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    columns = ("graph", "budget", "strategy", "status", "peak of step", "overhead", "gap", "seconds", "note")
    cells: list[Sequence[str]] = []
    for row in rows:
        peak = row["peak_bytes"]
        step = row["unplanned_peak_bytes"] - row["start_bytes"]
        cells.append(
            (
                row["graph"],
                row["budget"],
                row["strategy"],
                row["status"],
                "-" if peak is None else f"{(peak - row['start_bytes']) / step:.1%}",
                "-" if row["overhead"] is None else f"{row['overhead']:.2%}",
                "-" if row["gap"] is None else f"{row['gap']:.2%}",
                f"{row['solve_s']:.2f}",
                row["note"],
            )
        )
    return columns, cells


def _page(name: str, document: dict[str, Any], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    machine, versions = document["machine"], document["versions"]
    torch = versions.get("torch", "?")
    head = (
        f"# {name.capitalize()}\n\nMade by `{document['command']}` at commit {document['commit']} on {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; torch {torch}, Python {versions['python']}.\n\n"
    )
    return head + markdown(columns, rows) + "\n"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
