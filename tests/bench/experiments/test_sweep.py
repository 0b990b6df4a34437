"""Sweeps on a tiny model: interrupts, memory that runs out, batches that are predicted."""

import json
from dataclasses import replace

import pytest

import bench.experiments.sweep.run
from bench.__main__ import main
from bench.experiments.comparison.planned_steps import PROVEN_STEPS
from bench.experiments.prepared import captured
from bench.experiments.registry import load
from bench.experiments.sweep.figures import latency_label, reduction_label
from bench.experiments.sweep.rows import sweep_cells
from bench.experiments.sweep.run import run_sweep
from bench.workloads.spec import WorkloadSpec
from planner.errors import FileFormatError
from planner.scaling import with_times_of
from planner.solve import Status
from planner.synthetic import residual_tower
from profiler.measuring.memory import OutOfMemory
from tests.bench.experiments.test_sweep_figures import batch_row

WORK = "tests.bench.small:make"
SPEC = WorkloadSpec(source=WORK)


def said(capsys):
    """What was printed, without the line breaks of a terminal."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are drawn by one test, and not by those that look at rows."""
    monkeypatch.setattr(bench.experiments.sweep.run, "draw_sweep", lambda *_: [])


def sweep(out, batches, *, budget="80%", pairs=1, **options):
    return run_sweep(SPEC, batches, "mutwo", budget, pairs=pairs, time_limit_s=5.0, out=out, **options)


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    real, asked = bench.experiments.sweep.run.run_comparison, []

    def interrupted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if asked == [6, 8]:
            raise KeyboardInterrupt
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", interrupted_at_eight)
    command = ["--import", WORK, "--pairs", "1", "--strategy", "mutwo", "--budget", "80%", "--batches", "6,8"]
    assert main([*command, "--out", str(tmp_path)]) == 130
    assert "1 rows are in" in said(capsys)
    file = tmp_path / "sweep_tests_bench_small_make_mutwo_80pct.json"
    first = json.loads(file.read_text())["rows"]
    assert [row["batch"] for row in first] == [6]

    assert main([*command, "--out", str(tmp_path)]) == 0
    assert asked == [6, 8, 8]
    rows = json.loads(file.read_text())["rows"]
    assert [row["batch"] for row in rows] == [6, 8]
    assert rows[0] == first[0]
    assert "batches 6 are there" in said(capsys)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "peak_tests_bench_small_make_mutwo_80pct.png",
        "latency_tests_bench_small_make_mutwo_80pct.png",
    }
    with pytest.raises(FileFormatError, match="made with pairs 1, not 2"):
        sweep(tmp_path, [6], pairs=2)


def test_a_batch_that_exhausts_memory_and_larger_ones_are_predicted_from_the_measured(
    undrawn, tmp_path, capsys, monkeypatch
):
    real, asked = bench.experiments.sweep.run.run_comparison, []

    def exhausted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if spec.batch >= 8:
            raise OutOfMemory("out of memory while measuring: no room")
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", exhausted_at_eight)
    rows = sweep(tmp_path, [6, 8, 10], json_file=tmp_path / "rows.json")
    assert asked == [6, 8]
    assert [row.measured for row in rows] == [True, False, False]
    assert all(row.eager_s > 0 for row in rows)
    assert sweep_cells(rows[2])[-1] == "predicted: out of memory while measuring: no room"
    assert "it and larger ones are predicted" in said(capsys)
    assert load(tmp_path / "rows.json")[1].rows == rows


def test_a_prediction_continues_the_seconds_that_were_timed():
    graph, step_to_ops = residual_tower(3), bench.experiments.sweep.run._step_to_ops
    timed = batch_row(3, model=graph.name, eager_s=3 * graph.time_us / 1e6)
    larger = batch_row(4, model="a larger batch", eager_s=1e9)
    assert step_to_ops(graph, [timed, larger]) == pytest.approx(3.0)
    assert step_to_ops(graph, [replace(timed, eager_s=None)]) == 1.0
    assert step_to_ops(graph, [larger]) == 1.0


def test_a_row_carries_the_name_of_its_graph(undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.experiments.sweep.run, "lack_of", lambda *_, **__: "no room")
    (row,) = sweep(tmp_path, [4])
    assert row.model == captured(replace(SPEC, batch=4)).graph.name


def test_a_batch_that_cannot_even_be_made_is_predicted_without_memory(undrawn, tmp_path):
    rows = sweep(tmp_path, [2, 2**40])
    assert [row.measured for row in rows] == [True, False]
    assert rows[1].eager_peak_bytes > 2**40


def test_a_predicted_batch_after_an_interrupt_measures_the_largest_measured_one_anew(undrawn, tmp_path, monkeypatch):
    sweep(tmp_path, [6])
    monkeypatch.setattr(bench.experiments.sweep.run, "lack_of", lambda *_, **__: "no room")
    rows = sweep(tmp_path, [6, 8])
    assert [row.measured for row in rows] == [True, False]
    assert rows[1].eager_s > 0


def test_a_row_over_budget_says_so_with_the_smallest_peak_found(undrawn, tmp_path, capsys):
    (row,) = sweep(tmp_path, [6], budget="1%")
    assert row.status is Status.OVER_BUDGET
    assert (row.planned_peak_bytes, row.planned_s) == (None, None)
    assert row.smallest_peak_bytes > row.budget_bytes
    cells = sweep_cells(row)
    assert cells[2].startswith("over budget: smallest found ")
    assert cells[3] == "-"
    assert (reduction_label(row), latency_label(row)) == ("over\nbudget", "over\nbudget")
    assert "batch 6: smallest peak found" in said(capsys)


def test_times_scale_with_the_batch_also_where_only_what_an_op_reads_grows():
    few, many = (captured(replace(SPEC, batch=n)).graph for n in (8, 32))
    timed = replace(few, ops=tuple(replace(op, time_us=100.0, workspace_bytes=64) for op in few.ops))
    found = {op.name: op for op in with_times_of(many, timed).ops}
    handled = {
        op.name: [
            (many.values[v].shape, few.values[w].shape)
            for v, w in zip((*op.inputs, *op.outputs), (*source.inputs, *source.outputs), strict=True)
        ]
        for op, source in zip(many.ops, few.ops, strict=True)
    }
    growing = {name for name, shapes in handled.items() if any(now != before for now, before in shapes)}
    reducing = {name for name in growing if handled[name][-1][0] == handled[name][-1][1]}
    assert any(name.startswith("mm") for name in reducing)  # the gradient of a weight
    assert {found[name].time_us for name in growing} == {400.0}
    assert {found[name].workspace_bytes for name in growing} == {256}
    assert {op.time_us for name, op in found.items() if name not in growing} == {100.0}


def test_a_sweep_predicts_a_batch_that_would_not_fit(undrawn, tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench.experiments.sweep.run, "lack_of", lambda traced, *, proven_steps: f"no room for {proven_steps} steps"
    )
    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", lambda *_, **__: pytest.fail("it was run"))
    (row,) = run_sweep(SPEC, [6], "mutwo", "80%", pairs=1, time_limit_s=5.0, out=tmp_path)
    assert row.measured is False
    assert row.why_predicted == f"does not fit on this machine: no room for {PROVEN_STEPS} steps"
