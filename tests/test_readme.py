"""What the READMEs show has to work as printed, and what they say has to be there."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS, main
from bench.commands.compare import check_options
from bench.commands.options import add_verbosity
from bench.examples import own_strategy
from bench.experiments.comparison.side_by_side import COLUMNS
from planner.errors import PlannerError
from planner.solve import Problem, Status, solve
from planner.synthetic import residual_tower
from profiler.estimating.devices import DEVICES, find_device
from rewriter import CheckpointedStep, checkpoint
from strategies import make, names

ROOT = Path(__file__).parents[1]
ROOMS = ("planner", "profiler", "rewriter", "strategies", "bench")
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
PAGES |= {f"{room}/README.md": (ROOT / room / "README.md").read_text(encoding="utf-8") for room in ROOMS}
STRATEGIES, BENCH, REWRITER = (PAGES[f"{room}/README.md"] for room in ("strategies", "bench", "rewriter"))


# -- strategies -------------------------------------------------------------------------------------------------


def strategy_source() -> str:
    (source,) = re.findall(r"```python\n(# largest_first\.py\n.*?)```", STRATEGIES, re.DOTALL)
    return source


def test_the_printed_strategy_runs_through_the_registry(tmp_path):
    path = tmp_path / "largest_first.py"
    path.write_text(strategy_source(), encoding="utf-8")
    solution = solve(Problem.of(residual_tower(10), "70%"), make(f"{path}:LargestFirst:most=50"))
    assert solution.status is Status.FITS
    assert solution.overhead > 0


def test_the_printed_strategy_has_fifteen_lines_of_its_own_and_is_that_of_the_examples():
    lines = [line for line in strategy_source().splitlines() if line.strip() and not line.startswith("#")]
    assert len([line for line in lines if not line.startswith(("from ", "import "))]) <= 15
    assert inspect.getsource(own_strategy.LargestFirst) in strategy_source()


def test_the_printed_command_compares_it_with_mutwo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "largest_first.py").write_text(strategy_source(), encoding="utf-8")
    (command,) = [line for line in STRATEGIES.splitlines() if line.startswith("python -m bench")]
    assert main(shlex.split(command)[3:]) == 0


def test_every_strategy_there_is_is_listed_and_every_listed_one_there():
    listed = re.findall(r"^\| `(\w+)` \|", STRATEGIES.partition("## Your own")[0], re.MULTILINE)
    assert set(listed) == set(names())
    for name in listed:
        assert make(name).name == name


# -- commands ---------------------------------------------------------------------------------------------------


def printed_commands() -> list[list[str]]:
    """The arguments of every `python -m bench` that a page prints."""
    lines = (line.removeprefix("$ ") for page in PAGES.values() for line in page.splitlines())
    found = {line for line in lines if line.startswith("python -m bench")}
    return [shlex.split(line, comments=True)[3:] for line in sorted(found)]


@pytest.mark.parametrize("arguments", printed_commands(), ids=" ".join)
def test_every_command_that_a_page_prints_is_understood(arguments):
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "compare"
    parser = argparse.ArgumentParser()
    importlib.import_module(f"bench.commands.{name}").add_options(parser)
    add_verbosity(parser)
    options = parser.parse_args(arguments)
    if name == "compare":
        check_options(options)


def test_every_command_is_printed_once_at_least():
    shown = {arguments[0] for arguments in printed_commands() if arguments}
    assert set(COMMANDS) <= shown


def test_every_example_is_named():
    scripts = [path.name for path in (ROOT / "bench" / "examples").glob("*.py") if path.stem != "__init__"]
    assert [name for name in scripts if f"`{name}`" not in BENCH] == []


# -- what is said -----------------------------------------------------------------------------------------------


def test_the_printed_signature_is_that_of_checkpoint():
    (printed,) = re.findall(r"```python\n(checkpoint\(.*?\))\n```", REWRITER, re.DOTALL)
    parameters = inspect.signature(checkpoint).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    expected = str(inspect.Signature(plain)).replace("'", '"')
    assert " ".join(printed.split()) == f"checkpoint{expected}"


def test_every_option_of_checkpoint_and_every_member_of_a_step_is_explained():
    options = [p for p in inspect.signature(checkpoint).parameters if p not in ("train_step", "model", "optimizer")]
    text = REWRITER.partition("```python\ncheckpoint(")[2].partition("```")[2]
    assert [option for option in options if option not in text] == []
    members = [name for name in vars(CheckpointedStep) if not name.startswith("_") and name != "prepare"]
    assert [name for name in members if f"step.{name}" not in text] == []


def errors() -> set[str]:
    """Every error made on purpose, in all rooms."""
    for room in ROOMS:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            importlib.import_module(module.name)
    found, todo = set(), [PlannerError]
    while todo:
        todo += (subclasses := todo.pop().__subclasses__())
        found |= {cls.__name__ for cls in subclasses if cls.__module__.partition(".")[0] in ROOMS}
    return found


def test_every_error_stands_in_a_table():
    listed = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]*)\|", "\n".join(PAGES.values()), re.M))))
    assert errors() <= listed


def test_every_known_device_is_named_and_the_printed_file_is_read(tmp_path):
    page = PAGES["profiler/README.md"]
    assert [name for name in DEVICES if name not in page or name not in BENCH] == []
    (toml,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_card.toml").write_text(toml, encoding="utf-8")
    assert find_device(str(tmp_path / "my_card.toml")).name == "my card"


# -- numbers ----------------------------------------------------------------------------------------------------

# A row of the README's table -> the rows of the committed tables, where they are called otherwise.
CALLED = {
    f"{name}, budget 59% (ResNet), 66% (BERT)": (f"{name}, budget 59%", f"{name}, budget 66%")
    for name in ("ilp", "mutwo")
}


EQUAL = COLUMNS.index("every bit equal") - 1  # among the cells after the name


def committed(*stems: str) -> dict[str, tuple[str, ...]]:
    """Name -> peak, time and whether it is equal, from tables that are made from committed rows."""
    rows = {}
    for stem in stems:
        for line in (ROOT / "bench" / "results" / f"{stem}.md").read_text(encoding="utf-8").splitlines():
            name, *cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
            if len(cells) == len(COLUMNS) - 1:
                rows[name] = (cells[0], cells[1], cells[EQUAL].lower())
    return rows


def test_every_number_of_the_table_is_that_of_a_committed_row():
    resnet = committed("compare_resnet152_b4", "compare_resnet152_b4_early")
    bert = committed("compare_bert_b8", "compare_bert_b8_early")
    lines = [line for line in PAGES["README.md"].splitlines() if re.match(r"\| .*(yes|no)\b", line)]
    assert len(lines) >= 10
    for line in lines:
        name, *cells = [cell.strip(" *") for cell in line.replace("`", "").strip("|").split("|")]
        names_there, shown = CALLED.get(name, (name, name)), (tuple(cells[:3]), tuple(cells[3:]))
        for rows, there, here in zip((resnet, bert), names_there, shown, strict=True):
            assert rows.get(there, ("-", "-", "-")) == here, (name, there)


# -- pages ------------------------------------------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name):
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), link
        assert not anchor or anchor in anchors(path.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md"])
def test_every_file_that_a_page_names_is_there(name):
    folder = (ROOT / name).parent
    for path in re.findall(r"`([\w/]+(?:/|\.py|\.toml))`", PAGES[name]):
        if path not in MADE_UP:
            assert any((base / path).exists() for base in (ROOT, folder, *_below(folder))), path


MADE_UP = {"my_card.toml", "largest_first.py"}


def _below(folder: Path) -> list[Path]:
    """The room and what is in it; for a page about all rooms, those of all."""
    rooms = [ROOT / room for room in ROOMS] if folder == ROOT else [folder]
    return [*rooms, *(path for room in rooms for path in room.rglob("*") if path.is_dir())]


def test_the_first_page_can_be_read_in_a_few_minutes():
    assert len(PAGES["README.md"].splitlines()) <= 120
