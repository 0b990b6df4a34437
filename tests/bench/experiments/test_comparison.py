"""A comparison on a tiny model: budgets above the peak and below the floor, memory that runs out, one-line refusals."""

import io
import json
from contextlib import redirect_stdout

import pytest
import torch

import bench.experiments.accuracy
import bench.experiments.comparison.planned_steps
import bench.experiments.sweep.run
from bench.__main__ import main
from bench.experiments.accuracy import measure_accuracy
from bench.workloads.spec import WorkloadSpec
from tests.bench import small

WORK = "tests.bench.small:make"
SMALL = ["--import", WORK, "--batch", "8", "--pairs", "1"]
SPEC = WorkloadSpec(source=WORK)


def said(capsys):
    """What was printed, without the line breaks of a terminal."""
    return " ".join(capsys.readouterr().out.split())


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
    real = bench.experiments.comparison.planned_steps.apply

    def fails_once(traced, schedule):
        monkeypatch.setattr(bench.experiments.comparison.planned_steps, "apply", real)
        module = real(traced, schedule)
        module.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        return module

    monkeypatch.setattr(bench.experiments.comparison.planned_steps, "apply", fails_once)
    file = tmp_path / "rows.json"
    options = ["--strategy", "sqrtn,mutwo", "--budget", "60%", "--out", str(tmp_path), "--json", str(file)]
    assert main([*SMALL, *options]) == 0
    failed, went_well = json.loads(file.read_text())["rows"]
    assert failed["note"].startswith("out of memory while proving the planned step")
    assert (failed["exact"], went_well["exact"]) == (None, True)
    assert "sqrtn at 60%: out of memory" in said(capsys)


def test_a_plain_step_that_runs_out_of_memory_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        bench.experiments.comparison.planned_steps,
        "measure",
        lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")),
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
    monkeypatch.setattr(
        "bench.experiments.calibration.run.calibrated_cpu", lambda _: pytest.fail("the CPU was measured")
    )
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--model", "resnet18", f"--budget={budget}"]) == 2
    assert "budget" in capsys.readouterr().err
