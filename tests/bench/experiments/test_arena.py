"""What each idea of memory planning is worth: rows, their figure, and the picture of an arena."""

import math

import pytest
import torch

import strategies
from bench.__main__ import main
from bench.commands.results import make_tables
from bench.experiments.arena import ARENA, Idea, arena_rows, draw_ideas
from bench.experiments.arena_execution import ARENA_EXECUTION, Into, executed_cells, executed_row, in_arena
from bench.experiments.arena_execution import COLUMNS as EXECUTED_COLUMNS
from bench.experiments.prepared import prepared
from bench.experiments.registry import load
from bench.experiments.results_file import save_rows
from bench.show.arena_figure import draw_arena, picture
from bench.workloads.spec import WorkloadSpec
from planner.analysis import candidates
from planner.plan import recompute_once
from planner.schedule import lower, unplanned_schedule
from planner.simulator import simulate
from planner.solve import Problem, solve
from planner.synthetic import residual_tower, resnet_like
from profiler.ops import aten, out_form

SQUARE = torch.linspace(-2, 2, 64).reshape(8, 8)
CUBE = torch.linspace(-2, 2, 512).reshape(8, 8, 8)


@pytest.fixture(scope="module")
def rows():
    return arena_rows(resnet_like((1, 1, 2, 1)), strategy="mutwo", budget="60%")


def test_each_idea_takes_no_more_than_the_one_before_it(rows):
    assert [row.idea for row in rows] == list(Idea)
    arenas = [row.arena_bytes for row in rows]
    assert arenas == sorted(arenas, reverse=True)
    assert rows[0].arena_bytes > rows[1].arena_bytes > rows[3].arena_bytes


def test_an_allocator_holds_at_least_the_peak(rows):
    assert all(min(row.reserved_bytes, row.expandable_bytes) >= row.peak_bytes for row in rows[1:])


def test_rows_become_a_page_and_a_figure_again(rows, tmp_path):
    save_rows(tmp_path / "arena.json", ARENA, rows)
    assert load(tmp_path / "arena.json")[1].rows == rows
    assert {path.name for path in make_tables(tmp_path)} == {"arena.md", "arena.png"}
    assert "every op its own memory" in (tmp_path / "arena.md").read_text(encoding="utf-8")


def test_boxes_lie_in_the_arena_and_in_the_step_and_never_on_one_another(tmp_path):
    graph = residual_tower(3)
    schedule = lower(graph, recompute_once(graph, candidates(graph)[:4]))
    shown = picture(graph, schedule, label="x")
    end_ms = simulate(graph, schedule).time_us / 1e3
    for i, a in enumerate(shown.boxes):
        assert 0 <= a.start_ms <= a.end_ms <= end_ms
        assert 0 <= a.offset < a.offset + a.nbytes <= shown.nbytes
        for b in shown.boxes[:i]:
            apart = a.end_ms <= b.start_ms or b.end_ms <= a.start_ms
            assert apart or a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
    draw_arena(tmp_path / "arena.png", [shown, picture(graph, unplanned_schedule(graph), label="y")], title="t")
    assert (tmp_path / "arena.png").read_bytes().startswith(b"\x89PNG")


def test_one_step_alone_can_be_drawn(rows, tmp_path):
    draw_ideas(tmp_path / "ideas.png", rows)
    assert (tmp_path / "ideas.png").read_bytes().startswith(b"\x89PNG")


def test_a_bad_budget_is_told_before_anything_is_captured(capsys):
    assert main(["arena", "--budget", "cached:4GiB"]) == 2
    assert "no budget of kind 'cached'" in capsys.readouterr().err


# -- executed -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ready():
    return prepared(WorkloadSpec(source="tests.bench.small:make", batch=8), ["60%"])


def test_a_step_in_an_arena_leaves_what_eager_leaves_and_takes_what_it_says(ready):
    solution = solve(Problem.of(ready.graph, "60%"), strategies.make("mutwo"))
    inside = in_arena(ready, solution.schedule, close=10.0)  # everything that can lie in it does
    assert inside.runs_inside > 20
    seen = ready.proof(inside.planned, solution, ready.workload.batch, steps=2)
    assert seen.exact, str(seen)
    assert seen.measured_peak_bytes <= inside.outside_bytes
    assert inside.outside_bytes < solution.timeline.above_start_bytes <= inside.total_bytes


def test_both_versions_stay_within_one_peak(ready, tmp_path):
    row = executed_row(ready, strategy="mutwo", budget="60%", pairs=2)
    assert row.exact
    assert row.arena_peak_bytes <= row.allocator_peak_bytes
    save_rows(tmp_path / "arena_execution.json", ARENA_EXECUTION, [row])
    assert load(tmp_path / "arena_execution.json")[1].rows == [row]
    assert len(executed_cells(row)) == len(EXECUTED_COLUMNS)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.mm.default, (SQUARE, SQUARE.T)), (aten.addmm.default, (SQUARE[0], SQUARE, SQUARE)),
        (aten.bmm.default, (CUBE, CUBE)), (aten.gelu.default, (SQUARE,)),
        (aten.gelu_backward.default, (SQUARE, SQUARE)),
        (aten.threshold_backward.default, (SQUARE, SQUARE, 0)), (aten.add.Tensor, (SQUARE, SQUARE.T)),
        (aten._log_softmax.default, (SQUARE, 1, False)), (aten.sum.dim_IntList, (CUBE, [0, 2])),
        (aten.cat.default, ([SQUARE, SQUARE.T],)), (aten.clone.default, (SQUARE.T,)), (aten.mean.dim, (CUBE, [1])),
        (aten.native_batch_norm.default, (CUBE, SQUARE[0], SQUARE[1], None, None, True, 0.1, 1e-5)),
    ],
    ids=str,
)  # fmt: skip
def test_an_op_that_is_told_where_to_write_gives_the_same_bits_there(op, args):
    expected = op(*args)
    wanted = expected if isinstance(expected, tuple) else (expected,)
    memory = tuple(torch.full_like(tensor, math.nan) for tensor in wanted)
    made = Into(op, memory)(*args)
    for own, tensor, place in zip(made if isinstance(made, tuple) else (made,), wanted, memory, strict=True):
        assert own.data_ptr() == place.data_ptr()
        assert own.stride() == tensor.stride()
        assert torch.equal(own, tensor)


def test_ops_whose_out_form_only_copies_are_left_outside():
    assert out_form(aten.convolution.default) is None
    assert out_form(aten.native_layer_norm.default) is None
    assert out_form(aten.bernoulli.default) is None
