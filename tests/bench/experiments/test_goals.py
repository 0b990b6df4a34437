"""`python -m bench goals`: a goal is met or it is not, and graphs are made once."""

from dataclasses import replace

import pytest

from bench.__main__ import main
from bench.experiments.goals import CASES, Case, Goal, goal_cells, run_goals
from bench.experiments.registry import load
from bench.workloads.spec import WorkloadSpec
from planner.synthetic import residual_tower


@pytest.fixture
def made():
    return []


@pytest.fixture
def case(made):
    def graph(spec):
        made.append(spec)
        return residual_tower(4)

    goals = (Goal(budget="70%", gap=0.1, cpu_s=1000.0), Goal(budget="70%", gap=0.1, cpu_s=0.0))
    return Case(spec=WorkloadSpec(model="resnet18"), graph=graph, goals=goals)


def test_a_goal_needs_the_gap_and_the_time_and_rows_are_read_back(case, tmp_path):
    rows = run_goals([case], repeats=2, out=tmp_path / "rows.json")
    assert [row.met for row in rows] == [True, False]
    assert all(row.same and not row.cut_off for row in rows)
    assert [goal_cells(row)[8] for row in rows] == ["yes", "no"]
    assert list(load(tmp_path / "rows.json")[1].rows) == rows


def test_a_budget_that_nothing_fits_is_called_proven_impossible(case):
    (row,) = run_goals([replace(case, goals=(Goal(budget="2%", gap=0.1, cpu_s=1000.0),))], repeats=1)
    assert row.impossible
    assert not row.met
    assert goal_cells(row)[3:9:5] == ("-", "proven impossible")


def test_a_graph_that_is_kept_is_made_once(case, made, tmp_path):
    for _ in range(2):
        run_goals([case], repeats=1, graphs=tmp_path / "graphs")
    assert len(made) == 1


def test_a_text_that_no_title_has_is_one_line(capsys):
    assert main(["goals", "--only", "nothing like it"]) == 2
    assert "there are resnet152 b8" in capsys.readouterr().err
    assert len({case.spec.title for case in CASES}) == len(CASES)
