"""What an install brings, what it says where a package is missing, and that the files about it agree."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.show.axes import axes_beside, axes_in_grid
from bench.workloads import zoo
from bench.workloads.spec import WorkloadSpec
from planner.errors import MissingPackage, PlannerError
from planner.extras import needs_extra

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "profiler", "rewriter", "strategies", "bench")
EXTRAS = ("matplotlib", "torchvision", "transformers", "pulp")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def block(monkeypatch, package: str) -> None:
    """Make importing the package, and what of it was imported, fail as if it were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


def draw(tmp_path: Path) -> None:
    with axes_beside(tmp_path / "figure.png", [1], width=3):
        pass


def draw_grid(tmp_path: Path) -> None:
    with axes_in_grid(tmp_path / "figure.png", 1, title=""):
        pass


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("matplotlib", draw),
        ("matplotlib", draw_grid),
        ("torchvision", lambda _: zoo.resnet18(1)),
        ("transformers", lambda _: zoo.bert(1)),
    ],
)
def test_what_needs_a_package_that_is_missing_says_in_one_sentence_which_extra_has_it(
    package, use, monkeypatch, tmp_path
):
    block(monkeypatch, package)
    with pytest.raises(MissingPackage) as told:
        use(tmp_path)
    assert str(told.value) == f"{package} is not installed: pip install 'recompute-planner[bench]'"
    assert isinstance(told.value, PlannerError)


def test_a_missing_module_inside_of_a_package_is_told_by_the_package_that_lacks():
    with pytest.raises(MissingPackage, match="no_such_package is not installed"), needs_extra("bench"):
        import no_such_package.inside  # type: ignore[import-not-found]  # noqa: F401


def test_a_fault_that_is_no_missing_package_stays_itself():
    with pytest.raises(ImportError, match="cannot import name") as told, needs_extra("bench"):
        from json import no_such_name  # noqa: F401
    assert not isinstance(told.value, PlannerError)


def test_figures_that_cannot_be_drawn_are_told_before_any_work(monkeypatch, capsys, tmp_path):
    block(monkeypatch, "matplotlib")
    monkeypatch.setattr(WorkloadSpec, "make", lambda self: pytest.fail("a model was made"))
    assert main(["--model", "resnet18", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.strip() == "bench: matplotlib is not installed: pip install 'recompute-planner[bench]'"


def test_every_module_imports_where_no_extra_is_installed():
    script = textwrap.dedent(
        f"""
        import importlib, pkgutil, sys
        for name in {EXTRAS!r}:
            sys.modules[name] = None
        for name in {PACKAGES!r}:
            package = importlib.import_module(name)
            for module in pkgutil.walk_packages(package.__path__, name + "."):
                importlib.import_module(module.name)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_model_libraries_figures_and_cbc_are_extras():
    extras = PROJECT["optional-dependencies"]
    assert not [need for need in PROJECT["dependencies"] if need.startswith(EXTRAS)]
    assert [need.partition(">")[0] for need in extras["bench"]] == ["matplotlib", "torchvision", "transformers"]
    assert [need.partition(">")[0] for need in extras["cbc"]] == ["pulp"]


def test_both_commands_of_the_makefile_install_every_extra():
    (installs,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    inside = installs.partition("[")[2].partition("]")[0]
    assert set(inside.split(",")) == set(PROJECT["optional-dependencies"])


def test_everything_that_is_asked_for_is_pinned():
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    needs = PROJECT["dependencies"] + [need for extra in PROJECT["optional-dependencies"].values() for need in extra]
    assert {need.partition(">")[0].lower() for need in needs} <= pinned


def test_every_package_says_that_it_is_typed_and_ships_the_file():
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert "py.typed" in tool["setuptools"]["package-data"]["*"]


def test_the_version_is_the_same_wherever_it_stands():
    version = PROJECT["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_there_is_a_command_for_who_has_a_bench_of_their_own():
    module, _, name = PROJECT["scripts"]["recompute-planner"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_the_workflow_runs_the_one_command():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert workflow.rstrip().endswith("- run: make test")
