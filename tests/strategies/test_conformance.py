"""Every strategy keeps the contract, a plug-in's too; and the contract's tests do catch those that break it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

import strategies
from planner.analysis import candidates
from planner.errors import NoPlan, PlanError, StrategyError
from planner.ir import Graph, Rerun
from planner.plan import BoundClass, Eviction, Plan, recompute_once, with_bound
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem, Strategy
from strategies import conformance
from strategies.conformance import StrategyConformance

SPECS = (
    "auto",
    "ilp",
    "ilp:solver=cbc",
    "keep_all",
    "mutwo",
    "mutwo:faithful=true",
    "sqrtn",
    "sqrtn:segments=3",
    "sqrtn:snap=false",
    "cheap",
    "offload_only",
)


class TestOurOwn(StrategyConformance):
    @pytest.fixture(params=SPECS)
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return strategies.make(request.param)


class TestAPlugInFoundByItsEntryPoint(StrategyConformance):
    @pytest.fixture
    def strategy(self, install) -> Strategy:
        install("toy_package", entries=("toy = toy_package:Toy",))
        return strategies.make("toy")


class TestAStrategyThatHasNoPlan(StrategyConformance):
    @pytest.fixture
    def strategy(self) -> Strategy:
        @dataclass(frozen=True)
        class Timid:
            name: ClassVar[str] = "timid"

            def plan(self, problem: Problem) -> Plan:
                if problem.unplanned.peak_bytes > problem.budget_bytes:
                    raise NoPlan("timid: it does not fit as it is, and this strategy drops nothing")
                return Plan()

        return Timid()


# -- the suite itself -------------------------------------------------------------------------------------------


class _Broken:
    """Keeps everything; each subclass breaks one promise."""

    name: ClassVar[str] = "broken"

    def plan(self, problem: Problem) -> Plan:
        return Plan()


class NameWithOptions(_Broken):
    name = "broken:very=true"


class ReturnsNothing(_Broken):
    def plan(self, problem):
        return None


class RestoresTooEarly(_Broken):
    def plan(self, problem):
        storage = candidates(problem.graph)[0]
        return Plan(evictions=(Eviction(storage=storage, free_after=3, restore_before=2),))


class ChangesItsMind(_Broken):
    count = itertools.count()

    def plan(self, problem):
        return recompute_once(problem.graph, candidates(problem.graph)[: next(self.count) % 2])


class RenamesTheGraph(_Broken):
    def plan(self, problem):
        object.__setattr__(problem.graph, "name", "mine")
        return Plan()


class RetimesTheGraph(_Broken):
    def plan(self, problem):
        ops = tuple(replace(op, time_us=0.0) for op in problem.graph.ops)
        object.__setattr__(problem.graph, "ops", ops)
        return Plan()


class LiftsItsBudget(_Broken):
    def plan(self, problem):
        object.__setattr__(problem, "budget_bytes", 10**9)
        return Plan()


class AlwaysDropsEverything(_Broken):
    def plan(self, problem):
        return recompute_once(problem.graph, candidates(problem.graph))


class NeverHasAPlan(_Broken):
    def plan(self, problem):
        raise NoPlan("out of order")


class GivesNoReason(_Broken):
    def plan(self, problem):
        raise NoPlan("")


class FailsWhenItIsTight(_Broken):
    def plan(self, problem):
        return Plan() if problem.budget_bytes > 1 else [][0]


class DropsWhatNeverReruns(_Broken):
    def plan(self, problem):
        graph = problem.graph
        never = next(s for s, m in enumerate(graph.maker) if m is not None and graph.ops[m].rerun is Rerun.NEVER)
        return Plan(evictions=(Eviction(storage=never, free_after=graph.readers[never][-1], restore_before=None),))


class BoastsOfItsBound(_Broken):
    def plan(self, problem):
        return with_bound(Plan(), lower_bound_us=1.0, bound_class=BoundClass.ANY_SCHEDULE)


class BoundsNothingInParticular(_Broken):
    def plan(self, problem):
        return Plan(lower_bound_us=0.0)


class NamesAClassWithoutABound(_Broken):
    def plan(self, problem):
        return Plan(bound_class=BoundClass.ANY_SCHEDULE)


class CountsOnInPlaceForms(_Broken):
    def plan(self, problem):
        graph, budget = problem.graph, problem.budget_bytes
        if simulate(graph, lower(graph, Plan())).peak_bytes <= budget:
            return Plan()
        return recompute_once(graph, candidates(graph)[:-1])


BREACHES = [
    (NameWithOptions, "it_has_a_name_that_can_stand_in_a_spec", AssertionError),
    (ReturnsNothing, "it_returns_a_plan_that_can_be_carried_out", AssertionError),
    (RestoresTooEarly, "it_returns_a_plan_that_can_be_carried_out", PlanError),
    (ChangesItsMind, "two_calls_give_the_same_plan", AssertionError),
    (RenamesTheGraph, "it_mutates_nothing", AssertionError),
    (RetimesTheGraph, "it_mutates_nothing", AssertionError),
    (LiftsItsBudget, "it_mutates_nothing", AssertionError),
    (AlwaysDropsEverything, "a_generous_budget_costs_no_time", AssertionError),
    (NeverHasAPlan, "a_generous_budget_costs_no_time", AssertionError),
    (GivesNoReason, "a_tiny_budget_gives_its_best_plan_or_a_reason", AssertionError),
    (FailsWhenItIsTight, "a_tiny_budget_gives_its_best_plan_or_a_reason", StrategyError),
    (DropsWhatNeverReruns, "it_never_evicts_what_may_never_be_rerun", AssertionError),
    (BoastsOfItsBound, "its_bound_is_not_above_its_own_time", AssertionError),
    (BoundsNothingInParticular, "its_bound_is_not_above_its_own_time", AssertionError),
    (NamesAClassWithoutABound, "its_bound_is_not_above_its_own_time", AssertionError),
    (BoastsOfItsBound, "only_the_judge_sets_the_status", PlanError),
]


@pytest.mark.parametrize(("broken", "claim", "error"), BREACHES, ids=lambda p: getattr(p, "__name__", p))
def test_the_suite_catches_a_strategy_that_breaks_a_promise(broken, claim, error):
    graph = {} if "name" in claim else {"graph": conformance.chain()}
    with pytest.raises(error):
        getattr(StrategyConformance(), f"test_{claim}")(strategy=broken(), **graph)


def test_the_suite_catches_a_strategy_that_counts_on_in_place_forms():
    with pytest.raises(AssertionError, match="seems to count on in-place forms"):
        StrategyConformance().test_it_plans_for_steps_without_in_place_forms(CountsOnInPlaceForms())


def _smallest_and_unplanned(graph: Graph) -> tuple[int, int]:
    problem = Problem(graph=graph, budget_bytes=1)
    return problem.timeline(strategies.make("mutwo").plan(problem)).peak_bytes, problem.unplanned.peak_bytes


@pytest.mark.parametrize("name", [name for name in conformance.GRAPHS if name != "nothing_to_drop"])
def test_the_suite_s_graphs_leave_a_strategy_something_to_do(name):
    smallest, unplanned = _smallest_and_unplanned(conformance.GRAPHS[name]())
    assert smallest < unplanned


def test_one_of_the_suite_s_graphs_leaves_nothing_to_do():
    assert candidates(conformance.nothing_to_drop()) == ()


def test_the_suite_s_graphs_hold_ops_of_every_rerun_kind_and_several_rounds():
    ops = [op for make in conformance.GRAPHS.values() for op in make().ops]
    assert {op.rerun for op in ops} == set(Rerun)
    assert {op.round for op in ops} >= {0, 1}
    assert any(op.overwritable for op in ops)
