"""The trade-off curve is monotone and judged exactly, and the budget for an overhead keeps to it."""

from __future__ import annotations

import math

import pytest

from planner.errors import BudgetError
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem, Status, solve
from planner.synthetic import residual_tower, transformer
from strategies.frontier import budget_for, trade_off_curve
from strategies.ilp.search import Ilp
from strategies.mutwo.greedy import curve


@pytest.fixture(scope="module", params=[residual_tower(5), transformer(4)], ids=lambda g: g.name)
def graph(request):
    return request.param


@pytest.fixture(scope="module")
def points(graph):
    return trade_off_curve(graph, ["100%", "75%", "60%", "10%"])


def test_every_point_fits_its_budget_and_stands_above_its_bound(graph, points):
    assert [p.budget_bytes for p in points] == sorted((p.budget_bytes for p in points), reverse=True)
    assert points[0].overhead == 0
    for point in points:
        if point.plan is None:
            continue
        timeline = simulate(graph, lower(graph, point.plan))
        assert timeline.peak_bytes == point.peak_bytes <= point.budget_bytes
        assert timeline.overhead == pytest.approx(point.overhead)
        assert point.bound <= point.overhead + 1e-9
    assert points[-1].impossible
    assert points[-1].plan is None


def test_the_curve_falls_as_the_budget_rises_and_equals_single_solves_up_to_the_gap(graph, points):
    found = [p for p in points if p.plan is not None]
    overheads = [p.overhead for p in found]
    assert overheads == sorted(overheads)
    for point in found:
        single = solve(Problem(graph=graph, budget_bytes=point.budget_bytes), Ilp())
        assert single.status is Status.FITS
        assert point.overhead == pytest.approx(single.overhead, rel=0.011, abs=1e-9)


def test_the_least_memory_for_an_overhead_is_what_ilp_needs_for_it(graph):
    found = budget_for(graph, overhead=0.05)
    assert found.overhead <= 0.05 * (1 + 1e-9)
    assert found.floor_bytes <= found.peak_bytes
    timeline = simulate(graph, lower(graph, found.plan))
    assert (timeline.peak_bytes, timeline.overhead) == (found.peak_bytes, pytest.approx(found.overhead))
    there = solve(Problem(graph=graph, budget_bytes=found.peak_bytes), Ilp())
    assert there.overhead <= 0.05 * 1.01


def test_the_least_memory_is_never_more_than_greedy_needs(graph):
    for overhead in (0.02, 0.1):
        within = [p for p in curve(graph) if p.recompute_us <= overhead * graph.time_us]
        assert budget_for(graph, overhead=overhead).peak_bytes <= within[-1].peak_bytes
        assert budget_for(graph, overhead=overhead, time_limit_s=1e-9).overhead <= overhead


def test_no_overhead_at_all_needs_the_unplanned_peak_or_free_recomputation(graph):
    found = budget_for(graph, overhead=0.0)
    assert found.overhead == 0
    assert found.peak_bytes <= Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes


@pytest.mark.parametrize("overhead", [-0.1, math.nan, math.inf])
def test_an_overhead_that_is_no_share_of_the_time_is_refused(overhead):
    with pytest.raises(BudgetError, match=r"an overhead of .*: give a share"):
        budget_for(residual_tower(1), overhead=overhead)


def test_a_search_that_has_no_plan_at_all_is_a_point_without_one():
    (point,) = trade_off_curve(residual_tower(3), ["60%"], options=Ilp(seeds=False), time_limit_s=0.0)
    assert (point.plan, point.overhead, point.impossible) == (None, None, False)
