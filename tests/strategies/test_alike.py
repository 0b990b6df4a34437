"""Equal layers in `ilp`: what is alike is counted, what is small is priced, and neither makes a bound false."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from planner.ir import Graph
from planner.synthetic import residual_tower
from strategies.ilp.alike import alike, counted
from strategies.ilp.linear import SparseModel
from strategies.ilp.program import StagedProgram
from strategies.ilp.reduction import NEVER, Reduction, reduce
from strategies.ilp.search import Ilp, Search
from strategies.ilp.shared_work import FEW, Work, first_moments
from strategies.ilp.small import idle_small, prices
from strategies.ilp.solvers import Answer, Outcome, SolverName, solve_model
from tests.graphs import networks
from tests.strategies.test_ilp import SMALL, budgets, every_plan, is_small, optimum, problem_at


def solved(model: SparseModel) -> Answer:
    return solve_model(model, SolverName.ORTOOLS, time_limit_s=60, gap=0.0)


def test_the_layers_of_a_tower_are_alike_but_for_its_ends():
    classes = alike(Work(problem_at(residual_tower(12), 0.5)).reduction)
    sizes = sorted((len(blocks) for blocks in classes), reverse=True)
    assert sizes[0] >= 9
    assert len(classes) < sum(sizes) / 3


def test_counting_by_class_proves_more_than_the_relaxation_and_never_more_than_the_program():
    problem = problem_at(residual_tower(12), 0.5)
    work = Work(problem)
    program = work.program()
    model = program.at(problem.budget_bytes)
    by_class = solved(counted(program, model, alike(work.reduction))).objective
    relaxed = solved(model.relaxed()).objective
    whole = solve_model(model, SolverName.ORTOOLS, time_limit_s=60, gap=0.005)
    assert relaxed <= by_class * (1 + 1e-6)
    assert by_class <= whole.objective * (1 + 1e-6)


def test_a_search_has_proven_what_counting_by_class_proves_or_as_much_as_was_asked():
    problem = replace(problem_at(residual_tower(12), 0.4), time_limit_s=600)  # its work ends it, on any machine
    search = Search(problem, Ilp(gap=0.005))
    search.run()
    assert len(search.work.reduction.blocks) > FEW
    reduction = search.work.reduction
    program = StagedProgram(reduction, first_moments(reduction, in_place=True), in_place=True)
    by_class = solved(counted(program, program.at(problem.budget_bytes), alike(reduction))).bound
    assert search.best is not None
    assert search.bound_us >= 0.999 * min(by_class, (1 - 0.005) * search.best.recompute_us)


def everywhere(reduction: Reduction) -> StagedProgram:
    """The program that counts memory at every op, and during every rerun just before its first need."""
    inner = [(node.direct, op) for node in reduction.nodes.values() if node.direct != NEVER for op in node.merged]
    return StagedProgram(reduction, range(len(reduction.graph.ops)), inner, in_place=True)


def check_bounds(graph: Graph, small_share: float) -> int:
    """The program, relaxed and counted by class, is never dearer than the best of all plans; how often it says more."""
    plans, told = every_plan(graph), 0
    reduction = reduce(graph, step_bytes=problem_at(graph, 0.5).unplanned.above_start_bytes, small_share=small_share)
    program, classes = everywhere(reduction), alike(reduction)
    for budget in budgets(plans):
        best = optimum(plans, budget)
        if best is None:
            continue
        model = program.at(budget)
        for bounding in (counted(program, model, classes), model):
            answer = solved(bounding)
            assert answer.outcome is not Outcome.INFEASIBLE
            assert answer.bound <= best + 1e-6
            told += answer.bound > 1e-6
    return told


@pytest.mark.parametrize("small_share", [0.0, 0.1, 0.3])
def test_whatever_is_called_small_and_alike_the_bound_holds(small_share):
    assert sum(check_bounds(graph, small_share) for graph in SMALL) >= 10


@settings(max_examples=25, deadline=None)
@given(networks(max_layers=4))
def test_bounds_with_small_storages_hold_on_any_network(graph):
    if is_small(graph):
        check_bounds(graph, 0.2)


def test_small_bytes_have_the_price_of_the_cheapest_that_share_it():
    graph = residual_tower(3)
    reduction = reduce(graph, step_bytes=problem_at(graph, 0.5).unplanned.above_start_bytes, small_share=0.2)
    small = idle_small(reduction)
    told = prices(reduction, small)
    assert told
    assert sum(p.nbytes for p in told) == sum(s.nbytes for s in small)
    assert sum(p.time_us for p in told) <= sum(graph.ops[m].time_us for m in {s.maker for s in small}) + 1e-6
