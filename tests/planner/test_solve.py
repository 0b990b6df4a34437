"""The judge: statuses, bounds, reasons, and strategies that fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest

import strategies
from planner.errors import BudgetError, PlanError, StrategyError
from planner.ir import Graph
from planner.plan import BoundClass, Eviction, Plan, with_bound
from planner.schedule import Run, lower, unplanned_schedule
from planner.simulator import simulate, unplanned
from planner.solve import Problem, Solution, Status, Strategy, solve
from planner.synthetic import residual_tower
from tests.small import Says, bounded, eviction, names, nothing, read_twice, twice

# read_twice peaks at 341 bytes; with f dropped, its clone is back by then, so only a second eviction saves:
UNPLANNED, TWICE = 341, 321


def judged(answer: Callable[[Graph], Plan], budget_bytes: int = 1000, **options) -> Solution:
    return solve(Problem(graph=read_twice(), budget_bytes=budget_bytes), Says(answer), **options)


# -- statuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget_bytes", "status"),
    [(TWICE, Status.FITS), (TWICE - 1, Status.OVER_BUDGET), (UNPLANNED, Status.FITS)],
)
def test_a_plan_fits_up_to_the_very_byte(budget_bytes, status):
    solution = judged(twice, budget_bytes)
    assert solution.status is status
    assert (solution.timeline.peak_bytes, solution.timeline.recompute_us) == (TWICE, 10.0)


def test_a_plan_over_budget_says_the_smallest_peak_found_and_by_how_much_it_misses():
    solution = judged(twice, 300)
    assert solution.reason == "smallest peak found 321 B, 21 B over the budget of 300 B"
    assert solution.plan == twice(read_twice())


def test_a_plan_that_fits_says_so():
    assert judged(twice, 400).reason == "peak 321 B within 400 B"


def test_no_plan_carries_the_strategy_s_reason_and_nothing_else():
    solution = judged(nothing)
    assert (solution.status, solution.reason) == (Status.NO_PLAN, "says: no idea")
    assert (solution.plan, solution.schedule, solution.timeline) == (None, None, None)
    assert (solution.gap, solution.overhead, solution.dropped, solution.decisions) == (None, None, (), ())
    assert solution.solve_s >= 0


def test_a_malformed_plan_is_a_bug_and_propagates():
    with pytest.raises(PlanError, match="'x' cannot be dropped"):
        judged(lambda graph: Plan(evictions=(eviction(graph, "x", "g", "g_bw"),)))


def test_a_solution_knows_what_it_drops_and_why():
    solution = judged(twice)
    assert names(read_twice(), solution.dropped) == ["f"]
    assert [d.name for d in solution.decisions] == list(read_twice().storage_names)
    assert solution.overhead == pytest.approx(10 / 12)


def test_a_solution_reads_as_a_sentence():
    assert str(judged(twice, 400, label="twice")) == (
        "twice on read-twice: fits: peak 321 B (unplanned 341 B, budget 400 B), 83.3% more time "
        "(made up for a synthetic graph); drops 1 of 2 activations"
    )
    assert str(judged(nothing)) == "says on read-twice: no plan (says: no idea)"


@pytest.mark.parametrize("in_place", [True, False])
def test_the_judge_uses_in_place_forms_only_where_the_problem_allows_them(in_place):
    problem = Problem(graph=residual_tower(2), budget_bytes=1, in_place=in_place)
    solution = solve(problem, strategies.make("mutwo"))
    assert any(isinstance(s, Run) and s.into is not None for s in solution.schedule.steps) is in_place
    assert problem.timeline(solution.plan) == solution.timeline
    assert problem.unplanned == simulate(problem.graph, lower(problem.graph, Plan(), in_place=in_place))


def test_strategies_are_recognised_by_their_shape():
    assert isinstance(Says(twice), Strategy)
    assert not isinstance(object(), Strategy)


# -- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound_us", "gap"), [(10.0, 0.0), (5.0, 0.5), (0.0, 1.0)])
def test_the_gap_is_what_the_bound_leaves_open_of_the_recompute_time(bound_us, gap):
    assert judged(bounded(bound_us)).gap == pytest.approx(gap)


def test_a_plan_that_recomputes_nothing_leaves_no_gap():
    keep = with_bound(Plan(), lower_bound_us=0.0, bound_class=BoundClass.RECOMPUTE_ONCE)
    assert judged(lambda graph: keep).gap == 0


def test_a_bound_above_the_strategy_s_own_time_is_refused():
    with pytest.raises(PlanError) as caught:
        judged(bounded(10.5), label="boaster")
    assert str(caught.value) == (
        "boaster: claims that no plan recomputes and waits in less than 10.5 µs, but its own takes 10.0 µs"
    )


def test_a_bound_within_rounding_of_the_time_is_accepted():
    assert judged(bounded(10.0 + 1e-9)).status is Status.FITS


def test_a_bound_without_its_class_is_refused():
    with pytest.raises(PlanError, match=r"a bound of 1\.0 µs without the class of schedules"):
        judged(lambda graph: replace(twice(graph), lower_bound_us=1.0))


# -- the step as it is, and problems as people state them -----------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_the_unplanned_step_is_lowered_and_simulated_once_a_graph(in_place, monkeypatch):
    graph = residual_tower(3)
    expected = simulate(graph, lower(graph, Plan(), in_place=in_place))
    assert unplanned(graph, in_place=in_place) == expected
    assert unplanned_schedule(graph, in_place=in_place) == lower(graph, Plan(), in_place=in_place)
    monkeypatch.setattr("planner.simulator.Memory", None)
    monkeypatch.setattr("planner.schedule._Lowering", None)
    problem = Problem.of(graph, "60%", in_place=in_place)
    assert unplanned(graph, in_place=in_place) is problem.unplanned is problem.limited(1.0).timeline(Plan())
    assert problem.schedule(Plan()) is unplanned_schedule(graph, in_place=in_place)
    assert solve(problem, strategies.make("keep_all")).timeline is problem.unplanned


@pytest.mark.parametrize("in_place", [True, False])
def test_a_problem_of_a_share_bounds_start_and_that_share_of_what_the_step_adds(in_place):
    graph = residual_tower(3)
    base = simulate(graph, lower(graph, Plan(), in_place=in_place))
    problem = Problem.of(graph, "60%", time_limit_s=3.0, in_place=in_place)
    assert problem.budget_bytes == base.start_bytes + int(0.6 * base.above_start_bytes)
    assert (problem.graph, problem.time_limit_s, problem.in_place) == (graph, 3.0, in_place)


def test_a_problem_of_bytes_bounds_the_total_peak():
    graph = residual_tower(3)
    assert Problem.of(graph, "2KiB").budget_bytes == Problem.of(graph, 2048).budget_bytes == 2048
    with pytest.raises(BudgetError, match="nothing runs in no memory"):
        Problem.of(graph, "0%")


# -- strategies that fail -------------------------------------------------------------------------------------------


class Failing:
    """A strategy whose plan() does what it is told."""

    name: ClassVar[str] = "failing"

    def __init__(self, act: Callable[[Problem], object]) -> None:
        self.plan = act


def raising(error: Exception) -> Failing:
    def fail(_problem: Problem) -> object:
        raise error

    return Failing(fail)


PROBLEM = Problem.of(read_twice(), "90%")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (IndexError("list index\nout of range"), "mine: plan() raised IndexError: list index out of range"),
        (KeyError("x"), "mine: plan() raised KeyError: 'x'"),
        (AssertionError(), "mine: plan() raised AssertionError:"),
        (RecursionError("deep"), "mine: plan() raised RecursionError: deep"),
        (ValueError("v" * 10_000), "mine: plan() raised ValueError: vvv"),
    ],
)
def test_a_strategy_that_raises_anything_is_named_in_one_line_with_its_cause(error, words):
    with pytest.raises(StrategyError) as caught:
        solve(PROBLEM, raising(error), label="mine")
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("answer", [None, [], "plan", Plan, ["x"] * 10_000], ids=lambda a: f"{a!r:.10}")
def test_a_strategy_that_returns_no_plan_is_named_in_one_line(answer):
    with pytest.raises(StrategyError, match=r"failing: plan\(\) returned .*, not a Plan") as caught:
        solve(PROBLEM, Failing(lambda _: answer))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "evictions",
    [
        (None,),
        ("f",),
        (Eviction(storage="f", free_after=1, restore_before=None),),
        (Eviction(storage=1, free_after=None, restore_before=None),),
        (Eviction(storage=1, free_after=1, restore_before=2.5),),
        (Eviction(storage=10**6, free_after=1, restore_before=2),),
    ],
)
def test_a_malformed_plan_is_refused_with_the_name_of_the_strategy(evictions):
    with pytest.raises(PlanError, match=r"^mine: ") as caught:
        solve(PROBLEM, Failing(lambda _: Plan(evictions=evictions)), label="mine")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bound", [math.nan, math.inf, -math.inf, -1.0])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    plan = with_bound(Plan(), lower_bound_us=bound, bound_class=BoundClass.ANY_SCHEDULE)
    with pytest.raises(PlanError, match="failing: "):
        solve(PROBLEM, Failing(lambda _: plan))


def test_running_out_of_memory_is_no_fault_of_the_strategy():
    with pytest.raises(MemoryError):
        solve(PROBLEM, raising(MemoryError()))


@pytest.mark.parametrize("limit_s", [math.nan, math.inf, -math.inf, -1.0])
def test_a_time_limit_that_is_no_time_is_refused(limit_s):
    with pytest.raises(BudgetError, match=r"time limit of .* s: give a number of seconds"):
        Problem.of(read_twice(), "60%", time_limit_s=limit_s)
