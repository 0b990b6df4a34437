"""Comparison tables, which are read in a diff."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import strategies
from planner.analysis import candidates
from planner.comparison import COLUMNS, Row, cells, compare, table
from planner.errors import BudgetError
from planner.ir import Graph, Timing, TimingKind
from planner.solve import Problem, Status, solve
from planner.synthetic import accumulation, chain, residual_tower, transformer, unet
from tests.small import Says, block, bounded, golden, nothing, read_twice

SPECS = ("keep_all", "sqrtn", "cheap", "mutwo")
BUDGETS = ("90%", "70%", "50%", "40%", "30%")


def rows_of(graph: Graph) -> list[Row]:
    """The comparison, with the one column that no run repeats set to zero."""
    rows = compare(graph, [(spec, strategies.make(spec)) for spec in SPECS], BUDGETS)
    return [replace(row, solution=replace(row.solution, solve_s=0.0)) for row in rows]


COMPARED = {
    "tower": lambda: residual_tower(6),
    "unet": lambda: unet(3),
    "transformer": lambda: transformer(3),
    "accumulation": lambda: accumulation(2, 6),
}


@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_is_the_golden_table(name):
    assert table(rows_of(COMPARED[name]())) == golden(f"compare_{name}.txt")


@pytest.mark.parametrize("name", ["tower", "unet"])
def test_every_row_is_what_solving_it_alone_gives(name):
    graph = COMPARED[name]()
    base = Problem(graph=graph, budget_bytes=1).unplanned
    for row in rows_of(graph):
        share = int(row.budget.rstrip("%")) / 100
        budget = base.start_bytes + int(share * (base.peak_bytes - base.start_bytes))
        assert row.solution.problem.budget_bytes == budget
        alone = solve(Problem(graph=graph, budget_bytes=budget), strategies.make(row.strategy))
        assert (alone.plan, alone.timeline, alone.status) == (
            row.solution.plan,
            row.solution.timeline,
            row.solution.status,
        )


def test_rows_come_budget_by_budget_in_the_order_given():
    rows = compare(chain(3), [("a", strategies.make("mutwo")), ("b", strategies.make("cheap"))], ["60%", 700])
    assert [(r.graph, r.budget, r.strategy) for r in rows] == [
        ("chain-3", "60%", "a"), ("chain-3", "60%", "b"), ("chain-3", "700", "a"), ("chain-3", "700", "b"),
    ]  # fmt: skip
    assert rows[2].solution.strategy == "a"


def test_infeasible_rows_say_the_smallest_peak_reached():
    over = [row for row in rows_of(unet(3)) if row.solution.status is Status.OVER_BUDGET]
    assert over
    assert all(cells(row)[-1].startswith("smallest peak found ") for row in over)


def test_a_row_without_a_plan_shows_dashes_and_the_reason():
    (row,) = compare(read_twice(), [("says", Says(nothing))], ["50%"])
    row = replace(row, solution=replace(row.solution, solve_s=0.0))
    assert table([row]) == block("""
        graph       budget  strategy  status   peak  of step  overhead  dropped  gap  seconds  note
        read-twice  50%     says      no plan  -     -        -         -        -    0.00     says: no idea
    """)


def test_a_row_that_fits_shows_its_gap_and_the_strategy_s_note():
    answer = lambda graph: replace(bounded(9.0)(graph), note="by hand")  # noqa: E731
    (row,) = compare(read_twice(), [("says", Says(answer))], [325])
    shown = dict(zip(COLUMNS, cells(row), strict=True))
    assert (shown["status"], shown["gap"], shown["note"]) == ("fits", "10.0%", "by hand")
    # 311 of the 331 bytes that the unplanned step adds.
    assert (shown["peak"], shown["of step"], shown["overhead"], shown["dropped"]) == ("321 B", "94%", "83.3%", "1")


def test_a_comparison_refuses_a_budget_that_cannot_be_read():
    with pytest.raises(BudgetError, match="4 bananas"):
        compare(chain(2), [("keep_all", strategies.make("keep_all"))], ["4 bananas"])


def test_where_the_times_come_from_is_said():
    graph = read_twice()
    timed = graph.with_times(tuple([1.0] * len(graph.ops)), timing=Timing(kind=TimingKind.ESTIMATED, device="an H100"))
    solution = solve(Problem(graph=timed, budget_bytes=500), strategies.make("mutwo"))
    assert "(estimated for an H100)" in str(solution)


# -- the number of segments -------------------------------------------------------------------------------------


def judge_segments(graph: Graph, budget: str, spec: str) -> tuple[bool, float]:
    """(misses the budget, recompute time or peak): less is better."""
    (row,) = compare(graph, [(spec, strategies.make(spec))], [budget])
    timeline = row.solution.timeline
    misses = row.solution.status is not Status.FITS
    return misses, timeline.peak_bytes if misses else timeline.recompute_us


@pytest.mark.parametrize(
    ("graph", "budget", "best_k"),
    [(residual_tower(6), "50%", 6), (unet(3), "90%", 10), (unet(5), "70%", 6), (residual_tower(6), "90%", 2)],
    ids=["tower-50%", "unet-3-90%", "unet-5-70%", "tower-90%"],
)
def test_another_number_of_segments_than_the_square_root_wins(graph, budget, best_k):
    n = len(candidates(graph))
    judged = {k: judge_segments(graph, budget, f"sqrtn:segments={k}") for k in range(1, n + 1)}
    root = math.isqrt(n)
    assert min(judged, key=lambda k: (judged[k], k)) == best_k != root
    assert judged[best_k] < judged[root]
    assert judge_segments(graph, budget, "sqrtn") == judged[best_k]
