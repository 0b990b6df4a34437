"""Rows as tables: for the terminal, for Markdown, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.show.terminal import console
from planner.comparison import COLUMNS, Row, cells
from planner.solve import Status
from planner.units import human_bytes

_COLORS = {Status.FITS: "green", Status.OVER_BUDGET: "yellow", Status.NO_PLAN: "red"}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "") -> None:
    """A table for people; numbers stand on the right."""
    shown = Table(title=title, caption=caption or None, caption_justify="left", title_justify="left")
    for i, column in enumerate(columns):
        numeric = all(_is_number(row[i]) for row in rows)
        shown.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit() or cell[:2].lstrip("+-")[:1].isdigit()


def print_comparison(rows: Sequence[Row], *, title: str, caption: str = "") -> None:
    """The comparison of strategies at several budgets on one graph, one row each."""
    status = COLUMNS.index("status")
    colored = []
    for row in rows:
        line = list(cells(row))
        line[status] = f"[{_COLORS[row.solution.status]}]{line[status]}[/]"
        colored.append(line[1:])  # the title names the graph
    print_table(title, COLUMNS[1:], colored, caption=caption)


def graph_caption(rows: Sequence[Row]) -> str:
    """What a comparison on one graph was made on."""
    problem = rows[0].solution.problem
    peak, start = human_bytes(problem.unplanned.peak_bytes), human_bytes(problem.unplanned.start_bytes)
    return (
        f"{len(problem.graph.ops):,} ops, times {problem.graph.timing}. Unplanned peak {peak}, of which {start} before "
        "the step. 'of step': what the step adds, planned to unplanned."
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as columns of text; the last one is left ragged."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
