"""Sweeps on a tiny model: interrupts, memory that runs out, batches that are predicted."""

import json
from dataclasses import replace

import pytest

import bench.experiments.accuracy
import bench.experiments.comparison.planned_steps
import bench.experiments.sweep.run
from bench.__main__ import main
from bench.experiments.comparison.planned_steps import PROVEN_STEPS
from bench.experiments.sweep.figures import latency_label, reduction_label
from bench.experiments.sweep.run import run_sweep, sweep_cells
from bench.workloads.spec import WorkloadSpec
from planner.errors import FileFormatError
from planner.scaling import with_times_of
from planner.synthetic import residual_tower
from profiler.measuring.memory import OutOfMemory

WORK = "tests.bench.small:make"
SMALL = ["--import", WORK, "--batch", "8", "--pairs", "1"]
SPEC = WorkloadSpec(source=WORK)


def said(capsys):
    """What was printed, without the line breaks of a terminal."""
    return " ".join(capsys.readouterr().out.split())


def sweep(out, batches, *, budget="60%", pairs=1, **options):
    return run_sweep(SPEC, batches, "mutwo", budget, pairs=pairs, time_limit_s=5.0, out=out, **options)


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    real, asked = bench.experiments.sweep.run.run_comparison, []

    def interrupted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if asked == [6, 8]:
            raise KeyboardInterrupt
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", interrupted_at_eight)
    command = ["--import", WORK, "--pairs", "1", "--strategy", "mutwo", "--budget", "60%", "--batches", "6,8"]
    assert main([*command, "--out", str(tmp_path)]) == 130
    assert "1 rows are in" in said(capsys)
    file = tmp_path / "sweep_tests_bench_small_make_mutwo_60pct.json"
    first = json.loads(file.read_text())["rows"]
    assert [row["batch"] for row in first] == [6]

    assert main([*command, "--out", str(tmp_path)]) == 0
    assert asked == [6, 8, 8]
    rows = json.loads(file.read_text())["rows"]
    assert [row["batch"] for row in rows] == [6, 8]
    assert rows[0] == first[0]
    assert "batches 6 are there" in said(capsys)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "peak_tests_bench_small_make_mutwo_60pct.png",
        "latency_tests_bench_small_make_mutwo_60pct.png",
    }
    with pytest.raises(FileFormatError, match="made with pairs 1, not 2"):
        sweep(tmp_path, [6], pairs=2)


def test_a_batch_that_exhausts_memory_and_larger_ones_are_predicted_from_the_measured(tmp_path, capsys, monkeypatch):
    real, asked = bench.experiments.sweep.run.run_comparison, []

    def exhausted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if spec.batch >= 8:
            raise OutOfMemory("out of memory while measuring: no room")
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", exhausted_at_eight)
    rows = sweep(tmp_path, [6, 8, 10], json_file=tmp_path / "rows.json")
    assert asked == [6, 8]
    assert [row["measured"] for row in rows] == [True, False, False]
    assert all(row["eager_s"] > 0 for row in rows)
    assert sweep_cells(rows[2])[-1] == "predicted: out of memory while measuring: no room"
    assert "it and larger ones are predicted" in said(capsys)
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == rows
    assert len(list(tmp_path.glob("*.png"))) == 2


def test_a_prediction_continues_the_seconds_that_were_timed(tmp_path):
    graph = residual_tower(3)
    rows = [{"model": graph.name, "eager_s": 3 * graph.time_us / 1e6}, {"model": "a larger batch", "eager_s": 1e9}]
    assert bench.experiments.sweep.run._step_to_ops(graph, rows) == pytest.approx(3.0)
    assert bench.experiments.sweep.run._step_to_ops(graph, [rows[0] | {"eager_s": None}]) == 1.0
    assert bench.experiments.sweep.run._step_to_ops(graph, rows[1:]) == 1.0
    (row,) = sweep(tmp_path, [4])  # rows carry the name of their graph
    workload = replace(SPEC, batch=4)
    assert row["model"] == workload.capture(workload.make()).graph.name


def test_a_batch_that_cannot_even_be_made_is_predicted_without_memory(tmp_path):
    rows = sweep(tmp_path, [2, 2**40])
    assert [row["measured"] for row in rows] == [True, False]
    assert rows[1]["eager_peak_bytes"] > 2**40


def test_a_predicted_batch_after_an_interrupt_measures_the_largest_measured_one_anew(tmp_path, monkeypatch):
    sweep(tmp_path, [6])
    monkeypatch.setattr(bench.experiments.sweep.run, "lack_of", lambda *_, **__: "no room")
    rows = sweep(tmp_path, [6, 8])
    assert [row["measured"] for row in rows] == [True, False]
    assert rows[1]["eager_s"] > 0


def test_a_row_over_budget_says_so_with_the_smallest_peak_found(tmp_path, capsys):
    (row,) = sweep(tmp_path, [6], budget="1%")
    assert row["status"] == "over budget"
    assert (row["planned_peak_bytes"], row["planned_s"]) == (None, None)
    assert row["smallest_peak_bytes"] > row["budget_bytes"]
    cells = sweep_cells(row)
    assert cells[2].startswith("over budget: smallest found ")
    assert cells[3] == "-"
    assert (reduction_label(row), latency_label(row)) == ("over\nbudget", "over\nbudget")
    assert "batch 6: smallest peak found" in said(capsys)


def test_times_scale_with_the_batch_also_where_only_what_an_op_reads_grows():
    few, many = (replace(SPEC, batch=n).capture(replace(SPEC, batch=n).make()).graph for n in (8, 32))
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


def test_a_sweep_predicts_a_batch_that_would_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(
        bench.experiments.sweep.run, "lack_of", lambda traced, *, proven_steps: f"no room for {proven_steps} steps"
    )
    monkeypatch.setattr(bench.experiments.sweep.run, "run_comparison", lambda *_, **__: pytest.fail("it was run"))
    (row,) = run_sweep(SPEC, [6], "mutwo", "60%", pairs=1, time_limit_s=5.0, out=tmp_path)
    assert row["measured"] is False
    assert row["why_predicted"] == f"does not fit on this machine: no room for {PROVEN_STEPS} steps"
