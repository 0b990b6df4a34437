"""The registry: what a spec may say, and what it answers to a spec that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import strategies
from planner.errors import StrategyError
from planner.solve import Problem, solve
from planner.synthetic import chain
from strategies.keep_all import KeepAll

FILE = """
from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Optional

from planner.plan import Plan


class Order(Enum):
    BYTES = "bytes"
    TIME = "time"


@dataclass(frozen=True)
class Mine:
    name: ClassVar[str] = "mine"
    depth: int = 1
    share: float = 0.5
    fast: bool = False
    label: str = ""
    order: Order = Order.BYTES
    limit: int | None = 7
    cap: Optional[int] = None
    made: bool = field(default=True, init=False)

    def plan(self, problem):
        return Plan()


class Plain:
    name = "plain"

    def plan(self, problem):
        return Plan()


@dataclass(frozen=True)
class Needy:
    name: ClassVar[str] = "needy"
    depth: int

    def plan(self, problem):
        return Plan()


class NotAStrategy:
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my.strategy.py"
    path.write_text(FILE)
    return str(path)


def refusal(spec: str) -> str:
    with pytest.raises(StrategyError) as caught:
        strategies.make(spec)
    return str(caught.value)


# -- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keep_all", "mutwo", "sqrtn", "cheap"])
def test_a_built_in_name_makes_the_strategy_of_that_name(name):
    assert strategies.make(name).name == name
    assert name in strategies.names()


def test_an_unknown_name_lists_the_known_ones():
    message = refusal("mutwoo")
    assert "unknown strategy 'mutwoo'" in message
    assert all(name in message for name in strategies.names())
    assert "path/to/file.py:ClassName" in message


def test_an_empty_spec_is_an_unknown_name():
    assert "unknown strategy ''" in refusal("")


def test_a_strategy_is_imported_only_when_it_is_asked_for(install):
    install("lazy_package", source="raise RuntimeError('imported')", entries=("lazy = lazy_package:Lazy",))
    assert "lazy" in strategies.names()
    assert strategies.make("keep_all").name == "keep_all"
    assert "lazy_package" not in sys.modules


# -- options ----------------------------------------------------------------------------------------------------


def test_an_unknown_option_lists_the_options():
    message = refusal("sqrtn:segment=12")
    assert "no option 'segment=12'" in message
    assert "segments (default None), snap (default True)" in message


def test_a_strategy_without_options_says_that_it_has_none():
    assert "the options of keep_all are: none" in refusal("keep_all:segments=2")


def test_an_option_without_a_value_is_refused():
    assert "no option 'snap'" in refusal("sqrtn:snap")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("sqrtn:segments=many", "option segments='many' is not int"),
        ("sqrtn:segments=1.5", "option segments='1.5' is not int"),
        ("sqrtn:segments=", "option segments='' is not int"),
        ("sqrtn:snap=maybe", "option snap='maybe' is not bool"),
        ("mutwo:faithful=1", "option faithful='1' is not bool"),
    ],
)
def test_a_bad_value_says_what_was_expected(spec, expected):
    message = refusal(spec)
    assert repr(spec) in message
    assert expected in message


def test_a_value_that_the_strategy_itself_refuses_is_told_with_the_spec():
    message = refusal("sqrtn:segments=0")
    assert "'sqrtn:segments=0'" in message
    assert "at least one" in message


def test_options_take_the_type_of_their_field(file):
    spec = f"{file}:Mine:depth=3,share=.25,fast=TRUE,label=a b,order=time,limit=none, cap = 5"
    mine = strategies.make(spec)
    assert (mine.depth, mine.share, mine.fast, mine.label) == (3, 0.25, True, "a b")
    assert (mine.order.value, mine.limit, mine.cap) == ("time", None, 5)


def test_a_value_outside_an_enum_lists_its_members(file):
    assert "['bytes', 'time']" in refusal(f"{file}:Mine:order=size")


def test_a_field_that_is_no_constructor_argument_is_no_option(file):
    assert "no option 'made=false'" in refusal(f"{file}:Mine:made=false")


def test_an_option_that_must_be_given_is_named(file):
    assert "depth" in refusal(f"{file}:Needy")
    assert "depth (required)" in refusal(f"{file}:Needy:wrong=1")
    assert strategies.make(f"{file}:Needy:depth=2").depth == 2


# -- plug-ins ---------------------------------------------------------------------------------------------------


def test_a_plug_in_is_found_by_its_entry_point_and_takes_options(install):
    install("toy_package", entries=("toy = toy_package:Toy",))
    assert "toy" in strategies.names()
    toy = strategies.make("toy:at_most=1")
    assert toy.at_most == 1
    solution = solve(Problem(graph=chain(4), budget_bytes=1), toy)
    assert len(solution.dropped) == 1


def test_a_plug_in_that_takes_the_name_of_a_built_in_is_refused_by_name(install):
    install("rival_package", entries=("mutwo = rival_package:Toy",))
    with pytest.raises(StrategyError, match=r"'mutwo' of rival_package \(rival_package:Toy\) clashes with our own"):
        strategies.names()


def test_two_packages_with_the_same_name_are_both_named(install):
    install("first_package", entries=("toy = first_package:Toy",))
    install("second_package", entries=("toy = second_package:Toy",))
    message = refusal("toy")
    assert "two packages offer a strategy 'toy'" in message
    assert "first_package (first_package:Toy)" in message
    assert "second_package (second_package:Toy)" in message


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'"),
        ("", "has no attribute 'Toy'"),
        ("1 / 0", "division by zero"),
        ("def oops(:", "invalid syntax"),
    ],
)
def test_a_plug_in_that_does_not_load_is_named_with_its_owner_and_the_cause(install, source, why):
    install("broken_package", source=source, entries=("toy = broken_package:Toy",))
    message = refusal("toy")
    assert "'toy' of broken_package (broken_package:Toy) does not load" in message
    assert why in message


def test_a_plug_in_that_is_no_strategy_is_refused(install):
    install("shy_package", source="Toy = 5", entries=("toy = shy_package:Toy",))
    message = refusal("toy")
    assert "shy_package (shy_package:Toy): 5 is not a strategy" in message
    assert "`plan(self, problem)`" in message


# -- files ------------------------------------------------------------------------------------------------------


def test_a_strategy_in_a_file_is_made_by_its_path_and_class(file):
    assert strategies.make(f"{file}:Plain").name == "plain"
    assert strategies.make(f"{file}:Mine").depth == 1


def test_a_file_that_is_not_there_is_named():
    assert "there is no file no/such/file.py" in refusal("no/such/file.py:Mine")


def test_a_class_that_is_not_in_the_file_lists_the_file_s_strategies(file):
    message = refusal(f"{file}:Min")
    assert "has no 'Min'; its strategies: Mine, Needy, Plain" in message


def test_a_file_without_strategies_says_so(tmp_path):
    (tmp_path / "empty.py").write_text("")
    assert "its strategies: none" in refusal(f"{tmp_path / 'empty.py'}:Mine")


def test_a_file_that_raises_is_named_with_the_error_and_leaves_no_module_behind(tmp_path):
    path = tmp_path / "raises.py"
    path.write_text("raise RuntimeError('out of order')")
    before = set(sys.modules)
    message = refusal(f"{path}:Mine")
    assert f"running {path} failed: RuntimeError('out of order')" in message
    assert set(sys.modules) == before


def test_a_class_in_a_file_that_is_no_strategy_says_what_it_lacks(file):
    message = refusal(f"{file}:NotAStrategy")
    assert "is not a strategy: it needs a class attribute `name` and `plan(self, problem)`" in message


# -- several specs in one text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("mutwo", ["mutwo"]),
        ("mutwo,sqrtn:segments=12,snap=false,ilp", ["mutwo", "sqrtn:segments=12,snap=false", "ilp"]),
        (" mutwo , ,cheap,", ["mutwo", "cheap"]),
        ("dir/f.py:Mine:depth=3,fast=true,mutwo", ["dir/f.py:Mine:depth=3,fast=true", "mutwo"]),
        ("mutwo,dir/f.py:Mine", ["mutwo", "dir/f.py:Mine"]),
        ("sqrtn:segments=2,sqrtn:segments=3", ["sqrtn:segments=2", "sqrtn:segments=3"]),
        ("", []),
    ],
)
def test_specs_are_separated_by_commas_and_keep_their_options(text, specs):
    assert strategies.split_specs(text) == specs


# -- refused in one line --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, 3, ["mutwo"], KeepAll()], ids=lambda spec: type(spec).__name__)
def test_what_is_no_text_names_no_strategy(spec):
    with pytest.raises(StrategyError, match="names no strategy: give text such as 'mutwo'"):
        strategies.make(spec)


def test_a_number_with_thousands_of_digits_is_refused_in_one_line():
    with pytest.raises(StrategyError, match="option segments=") as caught:
        strategies.make(f"sqrtn:segments={'9' * 5000}")
    assert len(str(caught.value)) < 250


def test_options_whose_types_cannot_be_read_are_refused_with_the_cause(tmp_path):
    source = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Odd:
    name: ClassVar[str] = "odd"
    depth: NoSuchType = 3

    def plan(self, problem):
        return None
"""
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(StrategyError, match="the types of its options cannot be read: name 'NoSuchType'"):
        strategies.make(f"{tmp_path / 'odd.py'}:Odd")


def test_a_strategy_whose_making_fails_is_told_with_the_spec(tmp_path):
    source = """
class Odd:
    name = "odd"

    def __init__(self):
        raise ZeroDivisionError("by nothing")

    def plan(self, problem):
        return None
"""
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(StrategyError, match=r"odd\.py:Odd': by nothing"):
        strategies.make(f"{tmp_path / 'odd.py'}:Odd")
