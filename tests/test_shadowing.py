"""Where a user's own module has the name of a room, importing ours says so in one sentence that names both files."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = runpy.run_path(str(ROOT / "planner" / "shadowing.py"))["check"]
NEEDS = {
    "strategies": ["planner"],
    "profiler": ["planner"],
    "rewriter": ["planner", "profiler", "strategies"],
    "bench": ["planner", "profiler", "strategies", "rewriter"],
}


def imported_rooms() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("planner", *NEEDS)]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A folder that Python searches before ours, as it does the folder of a script; none of our rooms is imported."""
    for name in imported_rooms():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in imported_rooms():  # a second copy of a module beside the first would be two of every class
        del sys.modules[name]


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in NEEDS.items() for name in names])
def test_importing_a_room_names_both_files_where_another_that_it_needs_is_shadowed(room, name, theirs):
    (theirs / f"{name}.py").write_text("raise SystemExit('the user did not ask to run this')\n", encoding="utf-8")
    with pytest.raises(ImportError) as told:
        importlib.import_module(room)
    ours = ROOT / name / "__init__.py"
    assert str(told.value).startswith(
        f"{room} needs its own {name}, {ours}, but Python finds {theirs / name}.py first:"
    )
    assert "\n" not in str(told.value)


def test_a_package_of_the_same_name_is_told_by_its_file(theirs):
    (theirs / "strategies").mkdir()
    (theirs / "strategies" / "__init__.py").touch()
    with pytest.raises(ImportError, match=r"Python finds .*/strategies/__init__\.py first"):
        CHECK(str(ROOT / "rewriter"), *NEEDS["rewriter"])


def test_a_module_that_was_imported_before_ours_is_told_too(theirs, monkeypatch):
    mine = types.ModuleType("planner")
    mine.__file__ = str(theirs / "planner.py")
    monkeypatch.setitem(sys.modules, "planner", mine)
    with pytest.raises(ImportError, match=r"Python finds .*/planner\.py first"):
        CHECK(str(ROOT / "strategies"), "planner")


def test_what_a_room_does_not_import_may_be_shadowed(theirs):
    (theirs / "bench").mkdir()
    (theirs / "bench" / "__init__.py").touch()
    CHECK(str(ROOT / "rewriter"), *NEEDS["rewriter"])
    assert importlib.import_module("strategies").__file__ == str(ROOT / "strategies" / "__init__.py")


def test_a_link_to_our_own_folder_is_ours(theirs):
    (theirs / "planner").symlink_to(ROOT / "planner")
    CHECK(str(ROOT / "strategies"), "planner")


def test_a_folder_of_data_hides_nothing(theirs):
    (theirs / "planner").mkdir()
    CHECK(str(ROOT / "strategies"), "planner")
    assert importlib.import_module("strategies").make("mutwo").name == "mutwo"


def test_the_command_line_says_it_in_its_last_line(tmp_path):
    (tmp_path / "planner.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--synthetic", "tower"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: bench needs its own planner, {ROOT / 'planner' / '__init__.py'}, but Python")
    assert f"{tmp_path / 'planner.py'} first:" in last
