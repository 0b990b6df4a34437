"""Large-neighbourhood search in `ilp`: never worse, the same whatever the clock says, and its proofs hold."""

from __future__ import annotations

import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from planner.analysis import candidates
from planner.errors import StrategyError
from planner.incremental import Incremental
from planner.ir import Graph
from planner.solve import Problem, Status, solve
from planner.synthetic import residual_tower, resnet_like
from strategies.ilp import search as ilp_module
from strategies.ilp.neighbourhoods import Neighbourhoods
from strategies.ilp.search import Ilp, Search
from strategies.ilp.shared_work import FEW, Work
from strategies.ilp.solvers import Outcome, SolverName, solve_model
from tests.graphs import networks
from tests.strategies.test_ilp import SMALL, budgets, every_plan, optimum, problem_at

LARGE = residual_tower(12)


def check_a_witness(graph: Graph, seed: int) -> None:
    """`ilp` alone at the peak of any plan: that plan fits, so one must be found, and none may be called dearer."""
    random = Random(seed)
    dropped = [s for s in candidates(graph) if random.random() < 0.5]
    state = Incremental(graph, dropped)
    solution = solve(Problem(graph=graph, budget_bytes=state.peak()[0]), Ilp(seeds=False))
    assert solution.status is Status.FITS, solution.reason
    assert (solution.plan.lower_bound_us or 0.0) <= state.recompute_us + 1e-6
    assert solution.plan.cut_off or solution.timeline.recompute_us <= state.recompute_us / (1 - 0.005) + 1e-6


def started(problem: Problem) -> Neighbourhoods:
    """Neighbourhoods around what `sqrtn` has."""
    work = Work(problem)
    dropped = {e.storage for e in strategies.make("sqrtn").plan(problem).evictions}
    state = work.state(x for x in work.reduction.blocks if x not in dropped)
    return Neighbourhoods(work, state, SolverName.ORTOOLS, problem.budget_bytes, deadline=time.perf_counter() + 600)


def test_windows_make_a_plan_cheaper_and_it_still_fits():
    problem = problem_at(LARGE, 0.5)
    near = started(problem)
    assert len(near.blocks) > FEW
    before_us = near.state.recompute_us
    gained = [near.around(free) for free, _ in zip(near.windows(), range(3), strict=False)]
    assert any(gained)
    assert near.state.recompute_us < before_us
    assert problem.timeline(near.state.plan()).peak_bytes <= problem.budget_bytes


def test_a_neighbourhood_of_nothing_changes_nothing():
    near = started(problem_at(LARGE, 0.5))
    state = near.state
    assert not near.around(set())
    assert near.state is state


def test_windows_reach_every_block_and_come_in_the_same_order_again():
    near = started(problem_at(LARGE, 0.5))
    first = [free for free, _ in zip(near.windows(), range(40), strict=False)]
    again = [free for free, _ in zip(near.windows(), range(40), strict=False)]
    assert first == again
    assert set().union(*first) == set(near.blocks)


def test_the_same_call_gives_the_same_plan_on_a_machine_that_is_slower(monkeypatch):
    problem = problem_at(resnet_like((2, 4, 8, 2)), 0.6, time_limit_s=1000.0)
    plan = Ilp(gap=0.0005, effort=0.1).plan(problem)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 7 * clock())  # everything seems to take seven times as long
    slower = Ilp(gap=0.0005, effort=0.1).plan(problem)
    assert not plan.cut_off
    assert slower == plan


def test_what_is_refuted_is_never_the_optimum(monkeypatch):
    monkeypatch.setattr(ilp_module, "FEW", 0)
    monkeypatch.setattr(ilp_module, "TRY_EVERY_SET", 0)
    proven = 0
    for graph in SMALL:
        plans = every_plan(graph)
        for budget in budgets(plans):
            best = optimum(plans, budget)
            search = Search(Problem(graph=graph, budget_bytes=budget), Ilp(gap=0.1))
            plan = search.run()
            if best is None:
                assert search.best is None
                continue
            assert search.bound_us <= best + 1e-6
            cost_us = search.problem.timeline(plan).recompute_us
            assert plan.cut_off or cost_us <= best / 0.9 + 1e-6
            proven += search.best is not None and cost_us > 0
    assert proven >= 10


def test_a_program_without_dear_points_has_the_same_optimum_or_none():
    work = Work(problem := problem_at(LARGE, 0.6))
    model = work.program().at(problem.budget_bytes).relaxed()
    least = solve_model(model, SolverName.ORTOOLS, time_limit_s=60, gap=0.0).objective
    looser = model.cheaper_than(1.01 * least)
    assert solve_model(looser, SolverName.ORTOOLS, time_limit_s=60, gap=0.0).objective == pytest.approx(least, rel=1e-5)
    stricter = model.cheaper_than(0.99 * least)
    assert solve_model(stricter, SolverName.ORTOOLS, time_limit_s=60, gap=0.0).outcome is Outcome.INFEASIBLE
    assert np.all(model.fixed({0: 1.0}).least[0] == 1.0)


@pytest.mark.parametrize("solver", SolverName, ids=lambda s: s.value)
def test_a_limit_of_nodes_stops_a_solve_and_what_it_proved_until_then_holds(solver):
    work = Work(problem := problem_at(residual_tower(5), 0.6))
    model = work.program().at(problem.budget_bytes)
    whole = solve_model(model, solver, time_limit_s=600, gap=0.05)
    stopped = solve_model(model, solver, time_limit_s=600, gap=0.0, nodes=1)
    assert stopped.outcome in (Outcome.SPENT, Outcome.SOLVED)
    assert stopped.bound <= whole.objective * (1 + 1e-6)


def test_an_effort_that_is_no_factor_is_refused():
    for effort in (0.0, -1.0, float("inf")):
        with pytest.raises(StrategyError, match="effort"):
            Ilp(effort=effort)


@settings(max_examples=60, deadline=None)
@given(networks(max_layers=8), st.integers(0, 2**32))
def test_what_some_plan_meets_is_never_called_impossible(graph, seed):
    check_a_witness(graph, seed)
