"""Rows to tables, and the progress of long work. Nothing here measures or decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from planner.comparison import COLUMNS, Row, cells
from planner.solve import Status
from planner.units import human_bytes

console = Console()
if not console.is_terminal:
    console = Console(width=150)  # a file or a pipe has no width of its own
_COLORS = {Status.FITS: "green", Status.OVER_BUDGET: "yellow", Status.NO_PLAN: "red"}


def say(text: str) -> None:
    """One plain line for a stage of long work where neither bar nor spinner shows it: in a pipe, in a file."""
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stage(text: str) -> Iterator[None]:
    """A stage of long work, shown while it lasts: by a spinner, or in a pipe by one plain line."""
    say(text)
    with console.status(text):
        yield


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
