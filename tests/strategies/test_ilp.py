"""`ilp` against brute force over every set that a plan may drop, with either solver, with none, and out of time."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from planner.analysis import candidates, temporaries
from planner.errors import StrategyError
from planner.incremental import Incremental
from planner.ir import Graph, Phase, Rerun, Role
from planner.plan import BoundClass, Plan, recompute_once
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem, Solution, Status, solve
from planner.synthetic import (
    Builder,
    Network,
    accumulation,
    batch_norm,
    chain,
    diamond,
    residual_tower,
    resnet_like,
    transformer,
    unet,
)
from strategies.ilp import search as ilp_module
from strategies.ilp import solvers as ilp_solvers
from strategies.ilp.polish import shed_free
from strategies.ilp.program import StagedProgram
from strategies.ilp.reduction import reduce
from strategies.ilp.search import Ilp, Search
from strategies.ilp.shared_work import backward_starts, first_moments
from strategies.ilp.solvers import Outcome, SolverError, SolverName, solve_model
from tests.graphs import networks
from tests.reference import naive_bytes, subsets

MOST = 8  # storages: 256 plans


# -- the oracle -------------------------------------------------------------------------------------------------


def every_plan(graph: Graph, *, in_place: bool = True) -> list[tuple[float, int]]:
    """(recompute time, peak) of every set of dropped activations and kept temporaries."""
    rows = []
    for dropped in subsets(candidates(graph)):
        for kept in subsets(temporaries(graph)):
            schedule = lower(graph, recompute_once(graph, dropped, kept=kept), in_place=in_place)
            rows.append((simulate(graph, schedule).recompute_us, max(naive_bytes(graph, schedule))))
    return rows


def optimum(plans: list[tuple[float, int]], budget_bytes: int) -> float | None:
    return min((us for us, peak in plans if peak <= budget_bytes), default=None)


def budgets(plans: list[tuple[float, int]], count: int = 4) -> list[int]:
    """One that nothing meets, the smallest that can be met, and some above it."""
    peaks = sorted({peak for _, peak in plans})
    spread = [peaks[len(peaks) * i // count] for i in range(1, count)]
    return list(dict.fromkeys([peaks[0] - 1, peaks[0], *spread]))


def is_small(graph: Graph) -> bool:
    return len(candidates(graph)) + len(temporaries(graph)) <= MOST


def multi_output() -> Graph:
    net = Network("multi")
    x = net.layer("a", [net.x], 60, time_us=3.0, extra_sizes=(20, 30))
    x = batch_norm(net, "norm", x, 60)
    x = net.layer("b", [x], 40, time_us=2.0, extra_sizes=(10,))
    return net.graph(net.layer("loss", [x], 1))


def never_rerun() -> Graph:
    net = Network("never")
    x = net.layer("a", [net.x], 50, time_us=2.0)
    x = net.layer("drawn", [x], 50, time_us=1.0, rerun=Rerun.NEVER)
    x = net.layer("b", [x], 70, time_us=4.0)
    x = net.layer("c", [x], 30, time_us=1.0)
    return net.graph(net.layer("loss", [x], 1))


def views() -> Graph:
    net = Network("views")
    x = net.layer("a", [net.x], 80, time_us=5.0)
    v = net.view("heads", x)
    y = net.layer("b", [v], 40, time_us=2.0)
    w = net.view("rows", v)
    z = net.layer("c", [w, y], 60, time_us=3.0)
    return net.graph(net.layer("loss", [z], 1))


def merged() -> Graph:
    """Chains of ops whose inner results no backward reads: they become one node each."""
    net = Network("merged")
    x = net.x
    for i in range(2):
        x = net.layer(f"a{i}", [x], 90, time_us=3.0)
        x = net.layer(f"b{i}", [x], 80, time_us=1.0, saves_input=False)
        x = net.layer(f"c{i}", [x], 50, time_us=2.0, saves_input=False, saves_output=True)
    return net.graph(net.layer("loss", [x], 1))


def overwriting() -> Graph:
    """A wide op at the peak that may run in place, after layers that could make room for it."""
    net = Network("overwriting")
    x = net.layer("a", [net.x], 50, time_us=3.0)
    x = net.layer("b", [x], 60, time_us=2.0)
    wide = net.layer("widen", [x], 300, time_us=4.0)
    wide = net.layer("scale", [wide], 300, overwritable=(wide,), saves_input=False, backward_in_place=True)
    return net.graph(net.layer("loss", [wide], 1, saves_input=False))


SMALL = [
    chain(6), diamond(3), residual_tower(1), unet(1), transformer(1), accumulation(2, 3), multi_output(),
    never_rerun(), views(), merged(),
]  # fmt: skip


def alone(graph: Graph, budget_bytes: int, *, in_place: bool = True, **options) -> Solution:
    problem = Problem(graph=graph, budget_bytes=budget_bytes, in_place=in_place)
    return solve(problem, Ilp(gap=0.0, seeds=False, **options))


def check_against(plans: list[tuple[float, int]], graph: Graph, budget_bytes: int, solution: Solution) -> None:
    best = optimum(plans, budget_bytes)
    assert solution.plan is not None
    assert solution.timeline is not None
    if best is None:
        assert solution.status is Status.OVER_BUDGET
        assert solution.gap is None
        assert "no schedule at all runs in less than" in solution.plan.note
        return
    assert solution.status is Status.FITS, solution.reason
    assert solution.timeline.recompute_us == pytest.approx(best, abs=1e-6)
    assert solution.plan.lower_bound_us is not None
    assert solution.plan.lower_bound_us <= best + 1e-6


# -- the optimum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", SMALL, ids=lambda g: g.name)
@pytest.mark.parametrize("solver", SolverName, ids=lambda s: s.value)
def test_it_equals_brute_force_on_every_shape(graph, solver):
    plans = every_plan(graph)
    for budget in budgets(plans):
        check_against(plans, graph, budget, alone(graph, budget, solver=solver))


@settings(max_examples=40, deadline=None)
@given(networks(max_layers=5), st.booleans())
def test_it_equals_brute_force_on_random_networks(graph, in_place):
    if not is_small(graph):
        return
    plans = every_plan(graph, in_place=in_place)
    for budget in budgets(plans, count=3):
        check_against(plans, graph, budget, alone(graph, budget, in_place=in_place))


@pytest.mark.parametrize("in_place", [True, False])
def test_the_program_alone_finds_the_optimum_of_every_shape(monkeypatch, in_place):
    monkeypatch.setattr(ilp_module, "TRY_EVERY_SET", 0)
    for graph in [*SMALL, overwriting()]:
        plans = every_plan(graph, in_place=in_place)
        for budget in budgets(plans):
            check_against(plans, graph, budget, alone(graph, budget, in_place=in_place))


def test_without_in_place_forms_it_proves_another_optimum_and_is_not_cut_off(monkeypatch):
    monkeypatch.setattr(ilp_module, "TRY_EVERY_SET", 0)
    graph = overwriting()
    plans = {in_place: every_plan(graph, in_place=in_place) for in_place in (True, False)}
    budget = min(peak for _, peak in plans[False])
    assert optimum(plans[True], budget) == 0 < optimum(plans[False], budget)
    solution = alone(graph, budget, in_place=False)
    assert solution.timeline.recompute_us == optimum(plans[False], budget)
    assert solution.plan.lower_bound_us == pytest.approx(solution.timeline.recompute_us, rel=1e-5)
    assert not solution.plan.cut_off


@settings(max_examples=40, deadline=None)
@given(networks(max_layers=5), st.booleans())
def test_its_bound_and_its_proofs_of_impossibility_are_never_false(graph, in_place):
    if not is_small(graph):
        return
    plans = every_plan(graph, in_place=in_place)
    for budget in budgets(plans, count=3):
        search = Search(Problem(graph=graph, budget_bytes=budget, in_place=in_place), Ilp(seeds=False))
        search._optimise()
        search._shrink_if_nothing_fits()
        best = optimum(plans, budget)
        assert best is None or not search.impossible
        assert best is None or search.bound_us <= best + 1e-6
        assert search.floor_bytes <= min(peak for _, peak in plans)


@settings(max_examples=40, deadline=None)
@given(networks(max_layers=5))
def test_storages_called_small_leave_the_bound_a_bound(graph):
    if not is_small(graph):
        return
    plans = every_plan(graph)
    step = Problem(graph=graph, budget_bytes=1).unplanned.above_start_bytes
    reduction = reduce(graph, step_bytes=step, small_share=0.25)
    program = StagedProgram(reduction, first_moments(reduction, in_place=True), in_place=True)
    for budget in budgets(plans, count=3):
        answer = solve_model(program.at(budget), SolverName.ORTOOLS, time_limit_s=10, gap=0.0)
        best = optimum(plans, budget)
        if best is not None:
            assert answer.outcome is Outcome.SOLVED
            assert answer.bound <= best + 1e-6


def test_inner_results_without_a_backward_use_are_merged():
    reduction = reduce(merged(), step_bytes=1000)
    assert len(reduction.merged) == 4
    assert sorted(len(node.merged) for node in reduction.nodes.values()) == [3, 3]


# -- larger graphs ----------------------------------------------------------------------------------------------

LARGER = [residual_tower(5), transformer(4), unet(3), accumulation(2, 8), resnet_like((1, 2, 2, 1), nbytes=1 << 16)]


def problem_at(graph: Graph, share: float, **options) -> Problem:
    base = Problem(graph=graph, budget_bytes=1).unplanned
    return Problem(graph=graph, budget_bytes=base.start_bytes + int(share * base.above_start_bytes), **options)


@pytest.mark.parametrize("graph", LARGER, ids=lambda g: g.name)
def test_it_is_never_worse_than_its_seeds_and_its_bound_is_below_theirs(graph):
    for share in (0.85, 0.7, 0.55):
        problem = problem_at(graph, share)
        mine = solve(problem, Ilp())
        for name in ("mutwo", "sqrtn", "cheap"):
            other = solve(problem, strategies.make(name))
            if other.status is not Status.FITS:
                continue
            assert mine.status is Status.FITS
            assert mine.plan.lower_bound_us <= other.timeline.recompute_us + 1e-6
            if name != "cheap":
                assert mine.timeline.recompute_us <= other.timeline.recompute_us + 1e-6


@pytest.mark.parametrize("graph", LARGER[:3], ids=lambda g: g.name)
def test_both_solvers_agree_up_to_the_gap(graph):
    problem = problem_at(graph, 0.7)
    costs = [solve(problem, Ilp(solver=s, gap=0.01, seeds=False)) for s in SolverName]
    if any(c.plan.cut_off for c in costs):
        return
    assert {c.status for c in costs} in ({Status.FITS}, {Status.OVER_BUDGET})
    if costs[0].status is Status.FITS:
        least, most = sorted(c.timeline.recompute_us for c in costs)
        assert most <= least / (1 - 0.01) + 1e-6


def test_time_never_rises_with_the_budget_up_to_the_gap():
    graph, gap = residual_tower(5), 0.01
    solutions = [solve(problem_at(graph, share), Ilp(gap=gap)) for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)]
    costs = [s.timeline.recompute_us for s in solutions if s.status is Status.FITS]
    assert costs[-1] == 0
    assert len(costs) >= 4
    for less, more in pairwise(costs):
        assert more <= less / (1 - gap) + 1e-6


def test_it_keeps_the_gap_it_was_asked_for_or_says_that_it_was_cut_off():
    for gap in (0.0, 0.05):
        solution = solve(problem_at(unet(3), 0.7), Ilp(gap=gap))
        assert solution.plan.cut_off or solution.gap <= gap + 1e-5


def test_updates_in_the_middle_of_a_backward_begin_no_new_one():
    graph = residual_tower(6)
    (turn,) = backward_starts(graph)
    updates = range(turn + 3, len(graph.ops), 3)
    ops = [replace(op, phase=Phase.OPTIMIZER) if op.id in updates else op for op in graph.ops]
    assert backward_starts(replace(graph, ops=tuple(ops))) == [turn]
    assert len(backward_starts(accumulation(2, 8))) == 2


def test_two_rounds_are_planned_in_both():
    graph = accumulation(2, 8)
    solution = solve(problem_at(graph, 0.6), Ilp())
    assert solution.status is Status.FITS
    rounds = {graph.ops[graph.maker[s]].round for s in solution.dropped}
    assert rounds == {0, 1}


def test_the_time_limit_holds_and_a_plan_is_returned():
    problem = problem_at(resnet_like((2, 4, 8, 2)), 0.35, time_limit_s=0.5)
    started = time.perf_counter()
    solution = solve(problem, Ilp(gap=0.0))
    assert time.perf_counter() - started < 20, "far beyond half a second, on any machine"
    assert solution.plan is not None
    assert (solution.plan.bound_class is BoundClass.RECOMPUTE_ONCE) == (solution.status is Status.FITS)


def test_out_of_time_it_simulates_no_more_than_a_plan_of_each_seed(monkeypatch):
    problem = problem_at(residual_tower(8), 0.5, time_limit_s=0.0)
    simulated = []
    timeline = Problem.timeline

    def counted(self, plan):
        simulated.append(plan)
        return timeline(self, plan)

    monkeypatch.setattr(Problem, "timeline", counted)
    plan = Ilp().plan(problem)
    assert plan.cut_off
    assert "cut off by the time limit" in plan.note
    assert len(simulated) <= 5  # unplanned twice, and the one plan of each seed


def test_what_comes_back_with_a_rerun_anyway_is_shed_while_it_is_over_the_budget():
    net = Network("shed")
    x = net.layer("a", [net.x], 1000, time_us=3.0, extra_sizes=(2,))  # its second output is small
    x = net.layer("b", [x], 1000, time_us=2.0)
    graph = net.graph(net.layer("loss", [x], 1))
    large, small = (s for s in candidates(graph) if graph.maker[s] == 0)
    state = Incremental(graph, [large])
    peak, us = state.peak()[0], state.recompute_us
    shed_free(state, [small], peak)
    assert not state.is_dropped(small), "it fits as it is"
    shed_free(state, [small], peak - 1)
    assert state.is_dropped(small)
    assert state.recompute_us == us
    kept = Incremental(graph)
    shed_free(kept, [small], 0)
    assert not kept.is_dropped(small), "alone it would cost a rerun"


def test_seeds_are_given_the_time_that_is_left(monkeypatch):
    limits = []

    class Recorder:
        name = "recorder"

        def plan(self, problem):
            limits.append(problem.time_limit_s)
            return Plan()

    monkeypatch.setattr(strategies, "make", lambda _name: Recorder())
    Ilp().plan(problem_at(residual_tower(3), 0.05, time_limit_s=3.0))
    assert len(limits) == 2
    assert 3.0 >= limits[0] > limits[1]


def test_the_plan_names_what_found_it():
    graph = residual_tower(5)
    assert solve(problem_at(graph, 1.0), Ilp()).plan.found_by == "keeping everything"
    solution = solve(problem_at(graph, 0.6), Ilp())
    assert solution.plan.found_by
    assert f"{solution.plan.found_by} won" in solution.plan.note


def test_keeping_everything_is_returned_with_a_bound_of_zero_for_any_schedule():
    solution = solve(problem_at(unet(2), 1.0), Ilp())
    assert solution.status is Status.FITS
    assert solution.gap == 0
    assert solution.plan.bound_class is BoundClass.ANY_SCHEDULE


def test_when_nothing_fits_the_smallest_peak_comes_with_the_floor():
    graph = residual_tower(4)
    solution = solve(problem_at(graph, 0.05), Ilp())
    assert solution.status is Status.OVER_BUDGET
    assert "proven: nothing fits, however often it recomputes" in solution.plan.note
    for name in ("mutwo", "sqrtn"):
        other = solve(problem_at(graph, 0.05), strategies.make(name))
        assert solution.timeline.peak_bytes <= other.timeline.peak_bytes


def test_the_note_says_who_won():
    solution = solve(problem_at(residual_tower(5), 0.6), Ilp())
    assert solution.plan.note.startswith("ilp: ")
    assert " won" in solution.plan.note


# -- solvers that are missing or fail ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("solver", "module", "package"),
    [
        (SolverName.ORTOOLS, "ortools.math_opt.python", "ortools"),
        (SolverName.CBC, "pulp", "'recompute-planner[cbc]'"),
    ],
)
def test_without_its_package_the_error_names_it_and_the_seeds_are_returned(monkeypatch, solver, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    problem = problem_at(residual_tower(5), 0.7)
    solution = solve(problem, Ilp(solver=solver))
    assert solution.status is Status.FITS
    assert f"pip install {package}" in solution.plan.note
    assert "only its seeds" in solution.plan.note
    assert solution.plan.lower_bound_us == 0
    best = min(solve(problem, strategies.make(n)).timeline.recompute_us for n in ("mutwo", "sqrtn"))
    assert solution.timeline.recompute_us <= best
    refused = solve(problem, Ilp(solver=solver, seeds=False))
    assert refused.status is Status.NO_PLAN
    assert f"pip install {package}" in refused.reason


def test_a_solver_that_fails_leaves_the_seeds(monkeypatch):
    def broken(*_args, **_options):
        raise SolverError("solver=ortools failed: out of luck")

    monkeypatch.setitem(ilp_solvers._BACKENDS, SolverName.ORTOOLS, broken)
    solution = solve(problem_at(residual_tower(5), 0.7), Ilp())
    assert solution.status is Status.FITS
    assert "out of luck" in solution.plan.note


def test_an_impossible_gap_is_refused():
    with pytest.raises(StrategyError, match="gap=1"):
        Ilp(gap=1.5)


# -- what it found wrong with the incremental simulator ---------------------------------------------------------


def test_a_view_that_the_backward_makes_of_a_clone_is_not_rerun():
    b = Builder("backward view")
    x = b.input("x", 4)
    a = b.one("a", [x], 40, time_us=3.0)
    loss = b.one("loss", [a], 4)
    back: dict = {"phase": Phase.BACKWARD}
    seed = b.one("seed", [loss], 4, role=Role.GRADIENT, **back)
    turned = b.view("turned", a, phase=Phase.BACKWARD, time_us=7.0)
    other = b.one("other", [seed], 4, role=Role.GRADIENT, **back)
    b.one("grad", [other, turned], 4, role=Role.GRADIENT, **back)
    b.outputs.append(loss)
    graph = b.build()
    (storage,) = candidates(graph)
    state = Incremental(graph, [storage])
    exact = simulate(graph, lower(graph, state.plan()))
    assert state.recompute_us == exact.recompute_us == 3.0
    assert state.peak()[0] == exact.peak_bytes
