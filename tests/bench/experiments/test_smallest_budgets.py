"""The smallest budgets met: by bisection, never below what is proven, and `ilp` at least as small as greedy."""

from __future__ import annotations

import pytest

from bench.experiments.plans import smallest_budgets as smallest
from bench.experiments.plans.smallest_budgets import COLUMNS, TOLERANCE, SmallestRow, smallest_budgets, smallest_cells
from planner.analysis import floor
from planner.solve import Problem
from planner.synthetic import residual_tower, transformer
from strategies.mutwo.greedy import curve


@pytest.fixture(scope="module", params=[residual_tower(3), transformer(4)], ids=lambda g: g.name)
def rows(request) -> dict[str, SmallestRow]:
    found = smallest_budgets(request.param, ["keep_all", "sqrtn", "mutwo", "ilp"], time_limit_s=1)
    assert [row.strategy for row in found] == ["sqrtn", "mutwo", "ilp"]
    rows = {row.strategy: row for row in found}
    assert rows["mutwo"].smallest_bytes == curve(request.param)[-1].peak_bytes
    return rows


def test_none_meets_less_than_is_proven_and_ilp_meets_what_greedy_does(rows):
    for row in rows.values():
        assert row.floor_bytes <= row.once_floor_bytes <= row.smallest_bytes <= row.unplanned_peak_bytes
    slack = TOLERANCE * (rows["ilp"].unplanned_peak_bytes - rows["ilp"].start_bytes)
    assert rows["ilp"].smallest_bytes <= min(rows["mutwo"].smallest_bytes, rows["sqrtn"].smallest_bytes) + slack


def test_a_strategy_that_never_drops_anything_meets_the_unplanned_peak(monkeypatch):
    monkeypatch.setattr(smallest, "SEARCHED", ("keep_all",))
    graph = residual_tower(2)
    (row,) = smallest_budgets(graph, ["keep_all"], time_limit_s=1)
    assert row.smallest_bytes == Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    assert row.overhead == 0
    assert row.floor_bytes == floor(graph).nbytes


def test_cells_tell_bytes_and_shares_of_the_step():
    row = SmallestRow(
        graph="g", strategy="s", smallest_bytes=150, start_bytes=100, unplanned_peak_bytes=300, once_floor_bytes=140,
        floor_bytes=120, overhead=0.25, solves=3, search_s=1.0,
    )  # fmt: skip
    assert smallest_cells(row) == ("g", "s", "150 B", "25.0%", "25.0%", "140 B", "20.0%", "120 B", "10.0%", "1.0")
    assert len(smallest_cells(row)) == len(COLUMNS)
