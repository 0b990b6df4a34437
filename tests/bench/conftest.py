"""Commands that many tests look at, run once in a process."""

import io
import json
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.comparison.rows import PlannedRow
from bench.experiments.registry import load
from planner.synthetic import residual_tower

ROOT = Path(__file__).parents[2]


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


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What commands on a saved graph left in a folder, and what they printed."""

    folder: Path
    said: str


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory):
    """Every command that takes a saved graph, in one process where importing torch fails."""
    folder = tmp_path_factory.mktemp("without_torch")
    graph = ["--graph", str(folder / "graph.json")]
    residual_tower(5).save(folder / "graph.json")
    curve = ["--budget", "100%,70%", "--out", str(folder), "--json", str(folder / "my_curve.json")]
    commands = [
        [*graph, "--strategy", "keep_all,sqrtn,cheap,mutwo"],
        ["graph", *graph, "--strategy", "mutwo", "--budget", "60%", "--out", str(folder / "shown")],
        ["pareto", *graph, *curve],
        ["pareto", *graph, "--budget-for", "5%", "--json", str(folder / "least.json")],
    ]
    script = textwrap.dedent(
        f"""
        import sys
        for name in ("torch", "torchvision", "transformers"):
            sys.modules[name] = None
        from bench.__main__ import main
        for command in {commands!r}:
            assert main(command) == 0, command
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return Planned(folder=folder, said=" ".join(done.stdout.split()))
