"""`auto` is what a user gets without choosing: never worse than `mutwo`, and it says who won."""

from __future__ import annotations

import sys

import pytest

import strategies
from planner.errors import StrategyError
from planner.plan import Plan
from planner.solve import Problem, Status, solve
from planner.synthetic import chain, residual_tower, resnet_like, transformer, unet
from strategies.auto import Auto
from strategies.ilp.search import Ilp


def at(graph, share, **options):
    base = Problem(graph=graph, budget_bytes=1).unplanned
    return Problem(graph=graph, budget_bytes=base.start_bytes + int(share * base.above_start_bytes), **options)


@pytest.mark.parametrize("graph", [residual_tower(5), transformer(4), unet(3)], ids=lambda g: g.name)
def test_it_is_never_worse_than_mutwo_and_says_who_won_and_the_gap(graph):
    for share in (0.8, 0.6):
        problem = at(graph, share)
        mine, greedy = solve(problem, Auto()), solve(problem, strategies.make("mutwo"))
        assert mine.plan.note.startswith("auto: ")
        if greedy.status is Status.FITS:
            assert mine.status is Status.FITS
            assert mine.timeline.recompute_us <= greedy.timeline.recompute_us + 1e-6
        if mine.status is Status.FITS:
            assert "of the optimum" in mine.plan.note


def test_without_a_solver_it_still_plans(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.math_opt.python", None)
    solution = solve(at(residual_tower(5), 0.7), Auto())
    assert solution.status is Status.FITS
    assert "pip install ortools" in solution.plan.note


def test_a_large_step_gets_more_seconds_and_never_more_than_the_problem_allows(monkeypatch):
    limits = []

    def plan(_self, problem):
        limits.append(problem.time_limit_s)
        return Plan(note="ilp: nothing")

    monkeypatch.setattr(Ilp, "plan", plan)
    for graph, limit_s in ((chain(3), 60.0), (resnet_like((3, 8, 36, 3), ops_per_update=16), 60.0), (chain(3), 2.0)):
        Auto().plan(Problem(graph=graph, budget_bytes=1, time_limit_s=limit_s))
    small, large, short = limits
    assert (small, short) == (5.0, 2.0)
    assert 5.0 < large < 10.0


def test_no_time_is_refused():
    with pytest.raises(StrategyError, match="seconds=0"):
        Auto(seconds=0)
