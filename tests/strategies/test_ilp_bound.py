"""Bounds for any schedule: never above what a schedule reaches, and never a false proof."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis import floor
from planner.plan import recompute_each_time, recompute_once
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem, solve
from planner.synthetic import residual_tower, transformer
from strategies.ilp.bounds import any_schedule_bound_us
from strategies.ilp.search import Ilp
from tests.graphs import networks_with_drops


@settings(max_examples=80, deadline=None)
@given(networks_with_drops(max_layers=8), st.booleans())
def test_no_schedule_is_below_the_bound_or_the_floor(drawn, in_place):
    graph, dropped = drawn
    for make in (recompute_once, recompute_each_time):
        timeline = simulate(graph, lower(graph, make(graph, dropped), in_place=in_place))
        assert floor(graph, in_place=in_place).nbytes <= timeline.peak_bytes
        bound_us = any_schedule_bound_us(graph, timeline.peak_bytes, in_place=in_place)
        assert bound_us <= timeline.recompute_us + 1e-6


def test_less_than_the_floor_is_impossible_at_once():
    graph = residual_tower(3)
    assert any_schedule_bound_us(graph, floor(graph).nbytes - 1) == math.inf
    assert any_schedule_bound_us(graph, floor(graph).nbytes) < math.inf


def test_any_schedule_may_be_cheaper_than_recomputing_once_but_never_dearer():
    for graph in (residual_tower(5), transformer(4)):
        base = Problem(graph=graph, budget_bytes=1).unplanned
        for share in (0.8, 0.6):
            budget = base.start_bytes + int(share * base.above_start_bytes)
            once = solve(Problem(graph=graph, budget_bytes=budget), Ilp())
            assert any_schedule_bound_us(graph, budget) <= once.timeline.recompute_us + 1e-6


def test_it_rises_as_the_budget_falls():
    graph = residual_tower(6)
    base = Problem(graph=graph, budget_bytes=1).unplanned
    shares = (1.0, 0.8, 0.6, 0.5)
    bounds = [any_schedule_bound_us(graph, base.start_bytes + int(share * base.above_start_bytes)) for share in shares]
    assert bounds == sorted(bounds)
    assert bounds[0] == 0
    assert bounds[-1] > 0
