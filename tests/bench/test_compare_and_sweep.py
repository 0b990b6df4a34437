"""Comparisons and sweeps on a tiny model: nothing to do, memory that runs out, interrupts, files of other settings."""

import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch

import bench.experiments.accuracy
import bench.experiments.measured_run
import bench.experiments.sweep
from bench.__main__ import main
from bench.experiments.accuracy import measure_accuracy
from bench.experiments.sweep import run_sweep, sweep_cells
from bench.machine.row_files import resumed_rows, save_rows
from bench.show.batch_figures import latency_label, reduction_label
from bench.workloads.spec import WorkloadSpec
from planner.errors import FileFormatError
from planner.synthetic import residual_tower
from profiler.measuring.memory import OutOfMemory
from tests.bench import small

WORK = "tests.bench.small:make"
SMALL = ["--import", WORK, "--batch", "8", "--pairs", "1"]
SPEC = WorkloadSpec(source=WORK)


def said(capsys):
    """What was printed, without the line breaks of a terminal."""
    return " ".join(capsys.readouterr().out.split())


def sweep(out, batches, *, budget="60%", pairs=1, **options):
    return run_sweep(SPEC, batches, "mutwo", budget, pairs=pairs, time_limit_s=5.0, out=out, **options)


# -- one comparison -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison at a budget to plan for, at one above the peak and at one that nothing meets."""
    out = tmp_path_factory.mktemp("compared")
    file = out / "rows.json"
    options = ["--strategy", "sqrtn,mutwo", "--budget", "60%,100%,1TiB,1%", "--out", str(out), "--json", str(file)]
    with redirect_stdout(io.StringIO()) as printed:
        assert main([*SMALL, *options]) == 0
    return out, json.loads(file.read_text()), " ".join(printed.getvalue().split())


def rows_at(document, budget):
    return [row for row in document["rows"] if row["budget"] == budget]


@pytest.mark.parametrize("budget", ["100%", "1TiB"])
def test_a_budget_above_the_peak_is_run_unplanned_and_said(compared, budget):
    for row in rows_at(compared[1], budget):
        assert (row["status"], row["dropped"], row["reruns"], row["exact"]) == ("fits", 0, 0, True)
        assert row["measured_ratio"] is not None
        assert row["predicted_overhead"] == 0
        assert row["note"].startswith("nothing to do: the step's own peak of")


def test_a_budget_that_nothing_meets_says_the_smallest_peak_and_runs_nothing(compared):
    for row in rows_at(compared[1], "1%"):
        assert row["status"] == "over budget"
        assert row["measured_peak_bytes"] is None
        assert row["note"].startswith("smallest peak found")


def test_each_budget_that_is_met_has_its_figures_and_its_plan_as_text(compared):
    names = {path.name for path in compared[0].iterdir()}
    for budget in ("60pct", "100pct", "1TiB"):
        assert {f"memory_{budget}.png", f"plan_{budget}.png", f"plan_{budget}.txt"} <= names
    assert not any("_1pct" in name for name in names)
    assert "recomputed before" in (compared[0] / "plan_60pct.txt").read_text()


def test_rows_say_where_they_came_from(compared):
    document = compared[1]
    assert {"python", "torch", "ortools", "recompute-planner"} <= set(document["versions"])
    assert {"cpu", "cores", "threads", "memory_gib", "system"} == set(document["machine"])
    assert document["commit"] != "unknown"
    assert document["command"].startswith("python -m bench")


def test_nothing_to_do_is_printed_once_a_budget(compared):
    assert compared[2].count("budget 100%: nothing to do") == 1
    assert compared[2].count("budget 1TiB: nothing to do") == 1
    assert "budget 60%: nothing to do" not in compared[2]


def test_in_a_pipe_each_stage_is_told(compared):
    for stage in ("small:make b8: making the model", "capturing the step", "planning mutwo at 60%", "timing, rounds"):
        assert stage in compared[2]


@pytest.mark.parametrize("grads", ["None", "tensors"])
def test_a_step_that_never_clears_its_gradients_is_timed(grads, tmp_path, monkeypatch):
    make = small.make_never_clearing
    if grads == "tensors":
        monkeypatch.setattr(small, "make_never_clearing", lambda batch: with_gradients(make(batch)))
    file = tmp_path / "rows.json"
    work = ["--import", "tests.bench.small:make_never_clearing", "--batch", "8", "--pairs", "3", "--out", str(tmp_path)]
    assert main([*work, "--strategy", "mutwo", "--budget", "80%", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["exact"] is True
    assert row["measured_ratio"] > 0


def with_gradients(workload):
    step, model, optimizer, batch = workload
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return step, model, optimizer, batch


def test_accuracy_times_a_step_that_never_clears_its_gradients(monkeypatch):
    monkeypatch.setattr(bench.experiments.accuracy, "_process_peak", lambda call: len(str(call())))
    row = measure_accuracy(WorkloadSpec(source="tests.bench.small:make_never_clearing", batch=8), pairs=2)
    assert row.simulated_bytes == row.allocator_bytes


def test_a_planned_step_that_runs_out_of_memory_is_a_row_that_says_so(tmp_path, capsys, monkeypatch):
    real = bench.experiments.measured_run.apply

    def fails_once(traced, schedule):
        monkeypatch.setattr(bench.experiments.measured_run, "apply", real)
        module = real(traced, schedule)
        module.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        return module

    monkeypatch.setattr(bench.experiments.measured_run, "apply", fails_once)
    file = tmp_path / "rows.json"
    options = ["--strategy", "sqrtn,mutwo", "--budget", "60%", "--out", str(tmp_path), "--json", str(file)]
    assert main([*SMALL, *options]) == 0
    failed, went_well = json.loads(file.read_text())["rows"]
    assert failed["note"].startswith("out of memory while proving the planned step")
    assert (failed["exact"], went_well["exact"]) == (None, True)
    assert "sqrtn at 60%: out of memory" in said(capsys)


def test_a_plain_step_that_runs_out_of_memory_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        bench.experiments.measured_run, "measure", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room"))
    )
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "bench: out of memory while measuring tests.bench.small:make b8: no room" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["graph"], ["profile"]])
def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bench.workloads.spec._from_zoo", lambda _: pytest.fail("a model was made"))
    (tmp_path / "file").write_text("not a folder")
    assert main([*command, "--model", "resnet18", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["verify"], ["graph"], ["pareto"], ["plans"], ["calibrate"]])
@pytest.mark.parametrize("budget", ["4 bananas", "0", "-3", ","])
def test_a_budget_that_cannot_be_read_is_told_before_the_work(command, budget, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bench.workloads.spec._from_zoo", lambda _: pytest.fail("a model was made"))
    monkeypatch.setattr("bench.experiments.calibration.calibrated_cpu", lambda _: pytest.fail("the CPU was measured"))
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--model", "resnet18", f"--budget={budget}"]) == 2
    assert "budget" in capsys.readouterr().err


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    real, asked = bench.experiments.sweep.run_comparison, []

    def interrupted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if asked == [6, 8]:
            raise KeyboardInterrupt
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep, "run_comparison", interrupted_at_eight)
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
    real, asked = bench.experiments.sweep.run_comparison, []

    def exhausted_at_eight(spec, *args, **kwargs):
        asked.append(spec.batch)
        if spec.batch >= 8:
            raise OutOfMemory("out of memory while measuring: no room")
        return real(spec, *args, **kwargs)

    monkeypatch.setattr(bench.experiments.sweep, "run_comparison", exhausted_at_eight)
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
    assert bench.experiments.sweep._step_to_ops(graph, rows) == pytest.approx(3.0)
    assert bench.experiments.sweep._step_to_ops(graph, [rows[0] | {"eager_s": None}]) == 1.0
    assert bench.experiments.sweep._step_to_ops(graph, rows[1:]) == 1.0
    (row,) = sweep(tmp_path, [4])  # rows carry the name of their graph
    workload = replace(SPEC, batch=4)
    assert row["model"] == workload.capture(workload.make()).graph.name


def test_a_batch_that_cannot_even_be_made_is_predicted_without_memory(tmp_path):
    rows = sweep(tmp_path, [2, 2**40])
    assert [row["measured"] for row in rows] == [True, False]
    assert rows[1]["eager_peak_bytes"] > 2**40


def test_a_predicted_batch_after_an_interrupt_measures_the_largest_measured_one_anew(tmp_path, monkeypatch):
    sweep(tmp_path, [6])
    monkeypatch.setattr(bench.experiments.sweep, "lack_of", lambda *_, **__: "no room")
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


# -- files of rows ------------------------------------------------------------------------------------------------


def test_rows_are_resumed_only_under_the_same_settings_and_versions(tmp_path):
    file = tmp_path / "rows.json"
    assert resumed_rows(file, settings={"pairs": 3}) == []
    save_rows(file, command="x", rows=[{"a": 1}], settings={"pairs": 3, "batches": (1, 2)})
    assert resumed_rows(file, settings={"pairs": 3, "batches": (1, 2)}) == [{"a": 1}]
    with pytest.raises(FileFormatError, match="made with pairs 3, not 5"):
        resumed_rows(file, settings={"pairs": 5, "batches": (1, 2)})
    document = json.loads(file.read_text())
    document["versions"]["torch"] = "0.4"
    file.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"made with torch '0\.4', not .*delete it or use another --out"):
        resumed_rows(file, settings={"pairs": 3, "batches": (1, 2)})


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": []}', "{half"])
def test_a_file_that_holds_no_rows_is_refused_with_the_way_on(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(FileFormatError, match="delete it or use another --out"):
        resumed_rows(file, settings={})


def test_rows_are_saved_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    save_rows(tmp_path / "rows.json", command="x", rows=[{"a": 1}])
    document = json.loads((tmp_path / "rows.json").read_text())
    assert (document["commit"], document["rows"]) == ("unknown", [{"a": 1}])


def test_saving_leaves_no_partial_file_behind(tmp_path):
    save_rows(tmp_path / "rows.json", command="x", rows=[])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_times_scale_with_the_batch_also_where_only_what_an_op_reads_grows():
    few, many = (replace(SPEC, batch=n).capture(replace(SPEC, batch=n).make()).graph for n in (8, 32))
    timed = replace(few, ops=tuple(replace(op, time_us=100.0, workspace_bytes=64) for op in few.ops))
    found = {op.name: op for op in bench.experiments.sweep.scaled(many, timed).ops}
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
