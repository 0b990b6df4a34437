"""What every experiment says of itself once: its rows, and how they become a table, further text and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bench.machine.provenance import Provenance
from bench.show.tables import print_table

Row = TypeVar("Row")
# Titles of columns, and the cells of every line.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Results(Generic[Row]):
    """What a results file holds: rows of one kind, and what made them."""

    path: Path
    provenance: Provenance
    settings: Any  # of the type that the experiment names; None where it names none
    rows: Sequence[Row]


def _no_text(results: Results[Any]) -> str:
    return ""


def _no_figures(results: Results[Any]) -> list[Path]:
    return []


@dataclass(frozen=True, kw_only=True)
class Experiment(Generic[Row]):
    """One kind of results file. Its rows are frozen records, each of one of the types in `rows`."""

    kind: str
    rows: tuple[type, ...]
    table: Callable[[Sequence[Row]], Table]
    below: Callable[[Results[Row]], str] = _no_text  # Markdown below the table
    draw: Callable[[Results[Row]], list[Path]] = _no_figures  # into files beside the results file
    settings: type | None = None  # a record of what rows of one file must share, where a run can be gone on with

    def print(self, title: str, rows: Sequence[Row], *, caption: str = "") -> None:
        """The table on the terminal."""
        columns, lines = self.table(rows)
        print_table(title, columns, lines, caption=caption)


def line_by_line(columns: Sequence[str], cells: Callable[[Row], Sequence[str]]) -> Callable[[Sequence[Row]], Table]:
    """A table with one line for every row."""
    return lambda rows: (columns, [cells(row) for row in rows])
