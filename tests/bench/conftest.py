"""Commands that many tests look at, run once in a process."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.comparison.rows import PlannedRow
from bench.experiments.registry import load


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a comparison left: its folder, its rows, the file as it is, and what it said without line breaks."""

    folder: Path
    rows: list[PlannedRow]
    document: dict
    said: str

    def at(self, budget):
        return [row for row in self.rows if row.budget == budget]


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The small step at a budget to plan for, at one above the peak and at one that nothing meets."""
    folder = tmp_path_factory.mktemp("compared")
    file = folder / "rows.json"
    options = ["--strategy", "sqrtn,mutwo", "--budget", "80%,100%,1TiB,1%", "--out", str(folder), "--json", str(file)]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["--import", "tests.bench.small:make", "--batch", "8", "--pairs", "1", *options]) == 0
    document = json.loads(file.read_text())
    said = " ".join(printed.getvalue().split())
    return Compared(folder=folder, rows=list(load(file)[1].rows), document=document, said=said)
