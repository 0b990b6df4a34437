"""The plan as the table that μ-TWO's users expect, and as a CSV file."""

import csv
import io

import pytest

from planner.errors import FileFormatError
from planner.explain import Choice, explain
from planner.plan import Plan, recompute_once
from planner.plan_table import COLUMNS, cells, plan_rows, write_plan_csv
from planner.schedule import lower
from planner.synthetic import residual_tower, transformer
from tests.small import eviction, foreign_view, read_twice, storages


def test_the_file_has_a_row_for_every_activation_that_the_backward_reads(tmp_path):
    graph = residual_tower(1)
    write_plan_csv(tmp_path / "plan.csv", graph, recompute_once(graph, storages(graph, "b0_conv", "b0_relu")))
    with (tmp_path / "plan.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["name", "module", "bytes", "decision", "recompute_us", "free_after", "restore_before"],
        ["stem", "", "100", "CHECKPOINT", "8.0", "", ""],
        ["b0_conv", "", "100", "RECOMPUTE", "8.0", "b0_norm", "b0_relu_bw"],
        ["b0_norm.1", "", "8", "CHECKPOINT", "10.0", "", ""],
        ["b0_relu", "", "100", "RECOMPUTE", "11.0", "b0_add", "b0_relu_bw"],
        ["b0_add", "", "100", "CHECKPOINT", "12.0", "", ""],
    ]


def test_a_storage_evicted_twice_has_every_place_of_its_evictions():
    graph = read_twice()
    twice = Plan(evictions=(eviction(graph, "f", "g", "g_bw"), eviction(graph, "f", "g_bw", "f_bw")))
    assert cells(plan_rows(graph, twice)[0]) == ("f", "", "100", "RECOMPUTE", "5.0", "g g_bw", "g_bw f_bw")


def test_what_never_comes_back_has_no_op_that_it_is_restored_before():
    graph = read_twice()
    (row,) = [r for r in plan_rows(graph, Plan(evictions=(eviction(graph, "f", "f_bw", None),))) if r.free_after]
    assert (row.choice, row.free_after, row.restore_before) == (Choice.RECOMPUTE, ("f_bw",), ())


def test_what_cannot_be_recomputed_is_a_checkpoint_without_a_cost():
    (row,) = plan_rows(foreign_view(), Plan())
    assert cells(row) == ("f", "", "8", "CHECKPOINT", "", "", "")


@pytest.mark.parametrize("graph", [residual_tower(3), transformer(2)], ids=lambda g: g.name)
def test_decisions_and_costs_are_those_that_are_explained(graph):
    plan = recompute_once(graph, storages(graph, *[r.name for r in plan_rows(graph, Plan())][::2]))
    told = {d.name: d for d in explain(graph, plan, lower(graph, plan))}
    rows = plan_rows(graph, plan)
    assert rows
    for row in rows:
        assert (row.choice, row.recompute_us) == (told[row.name].choice, told[row.name].recompute_us)


def test_names_with_commas_and_quotes_come_back(tmp_path):
    graph = read_twice()
    graph.__dict__["storage_names"] = ('x, "the batch"', 'f, "wide"', *graph.storage_names[2:])
    write_plan_csv(tmp_path / "plan.csv", graph, Plan())
    rows = list(csv.DictReader(io.StringIO((tmp_path / "plan.csv").read_text())))
    assert rows[0]["name"] == 'f, "wide"'
    assert tuple(rows[0]) == COLUMNS


def test_a_table_that_cannot_be_written_is_an_error_of_this_project(tmp_path):
    with pytest.raises(FileFormatError, match="cannot be written"):
        write_plan_csv(tmp_path / "missing" / "plan.csv", read_twice(), Plan())
