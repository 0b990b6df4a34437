"""What the README shows has to work as printed."""

import re
from pathlib import Path

from bench.__main__ import main
from planner.solve import Problem, Status, solve
from planner.synthetic import residual_tower
from planner.units import parse_budget
from strategies import make

README = Path(__file__).parents[1] / "README.md"


def strategy_source() -> str:
    (source,) = re.findall(r"```python\n(# largest_first\.py\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return source


def test_the_strategy_of_the_readme_runs_through_the_registry(tmp_path):
    path = tmp_path / "largest_first.py"
    path.write_text(strategy_source(), encoding="utf-8")
    strategy = make(f"{path}:LargestFirst:most=50")
    graph = residual_tower(10)
    unplanned = Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    budget = parse_budget("70%", start_bytes=graph.start_bytes, peak_bytes=unplanned)
    solution = solve(Problem(graph=graph, budget_bytes=budget), strategy)
    assert solution.status is Status.FITS
    assert solution.overhead > 0


def test_the_strategy_of_the_readme_has_fifteen_lines_of_its_own():
    lines = [line for line in strategy_source().splitlines() if line.strip() and not line.startswith("#")]
    assert len([line for line in lines if not line.startswith(("from ", "import "))]) <= 15


def test_the_command_of_the_readme_compares_it_with_mutwo(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "largest_first.py").write_text(strategy_source(), encoding="utf-8")
    assert main(["--synthetic", "tower", "--strategy", "mutwo,largest_first.py:LargestFirst:most=50"]) == 0


def test_every_strategy_the_readme_lists_exists():
    listed = re.findall(r"^\| `(\w+)` \|", README.read_text(encoding="utf-8").split("## Strategies")[1], re.MULTILINE)
    assert {"mutwo", "sqrtn", "cheap", "keep_all"} <= set(listed)
    for name in listed[: listed.index("keep_all") + 1]:
        assert make(name).name == name
