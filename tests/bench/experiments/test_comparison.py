"""A comparison on a small step: budgets above the peak and below the floor, memory that is not enough, refusals."""

import pytest

import bench.experiments.accuracy
import rewriter.memory_need
import rewriter.provisional
from bench.__main__ import main
from bench.experiments.accuracy import measure_accuracy
from bench.experiments.comparison.planned_steps import run_comparison
from bench.experiments.comparison.run import remarks
from bench.workloads.spec import WorkloadSpec
from planner.solve import Status
from profiler.measuring.memory import OutOfMemory
from rewriter.pipeline import Planned

SMALL = ["--import", "tests.bench.small:make", "--batch", "8", "--pairs", "1"]
SPEC = WorkloadSpec(source="tests.bench.small:make", batch=8)


def comparison(spec=SPEC, strategies=("mutwo",), budgets=("80%",), pairs=1):
    return run_comparison(spec, strategies, budgets, pairs=pairs, time_limit_s=5.0)


@pytest.mark.parametrize("budget", ["100%", "1TiB"])
def test_a_budget_above_the_peak_is_run_unplanned_and_said(compared, budget):
    for row in compared.at(budget):
        assert (row.status, row.dropped, row.reruns, row.exact) == (Status.FITS, 0, 0, True)
        assert row.measured_ratio is not None
        assert row.predicted_overhead == 0
        assert row.note.startswith("nothing to do: the step's own peak of")


def test_a_budget_to_plan_for_is_met_exactly_as_predicted(compared):
    for row in compared.at("80%"):
        assert (row.status, row.exact, row.prediction_error) == (Status.FITS, True, 0.0)
        assert row.measured_peak_bytes <= row.budget_bytes < row.eager_peak_bytes
        assert row.planned_s == pytest.approx(row.measured_ratio * row.eager_s)


def test_a_budget_that_nothing_meets_says_the_smallest_peak_and_runs_nothing(compared):
    for row in compared.at("1%"):
        assert row.status is Status.OVER_BUDGET
        assert row.measured_peak_bytes is None
        assert row.note.startswith("smallest peak found")


def test_each_budget_that_is_met_has_its_figures_and_its_plan_as_text(compared):
    names = {path.name for path in compared.folder.iterdir()}
    for budget in ("80pct", "100pct", "1TiB"):
        assert {f"memory_{budget}.png", f"plan_{budget}.png", f"plan_{budget}.txt"} <= names
    assert not any("_1pct" in name for name in names)
    assert "recomputed before" in (compared.folder / "plan_80pct.txt").read_text()


def test_rows_say_what_they_are_and_where_they_came_from(compared):
    document = compared.document
    assert document["kind"] == "comparison"
    assert {"python", "torch", "ortools", "recompute-planner"} <= set(document["versions"])
    assert {"cpu", "cores", "threads", "memory_gib", "system"} == set(document["machine"])
    assert document["commit"] != "unknown"
    assert document["command"].startswith("python -m bench")


def test_nothing_to_do_is_printed_once_a_budget(compared):
    assert compared.said.count("budget 100%: nothing to do") == 1
    assert compared.said.count("budget 1TiB: nothing to do") == 1
    assert "budget 80%: nothing to do" not in compared.said


def test_in_a_pipe_each_stage_is_told(compared):
    for stage in ("small:make b8: making the model", "capturing the step", "planning mutwo at 80%", "timing, rounds"):
        assert stage in compared.said


@pytest.mark.parametrize("make", ["make_never_clearing", "make_never_clearing_with_gradients"])
def test_a_step_that_never_clears_its_gradients_is_timed(make):
    (row,) = comparison(WorkloadSpec(source=f"tests.bench.small:{make}", batch=8), pairs=3).rows
    assert row.exact is True
    assert row.measured_ratio > 0


def test_accuracy_times_a_step_that_never_clears_its_gradients(monkeypatch):
    monkeypatch.setattr(bench.experiments.accuracy, "_process_peak", lambda call: len(str(call())))
    row = measure_accuracy(WorkloadSpec(source="tests.bench.small:make_never_clearing", batch=8), pairs=2)
    assert row.simulated_bytes == row.allocator_bytes


# -- memory that is not enough ------------------------------------------------------------------------------------


@pytest.fixture
def tight(monkeypatch):
    """A machine on which the step does not fit as it is."""
    monkeypatch.setattr(rewriter.provisional, "usable_bytes", lambda device: 1000)


def test_a_step_that_does_not_fit_as_it_is_is_planned_and_run_without_eager(tight, capsys):
    found = comparison()
    (row,) = found.rows
    assert (row.status, row.exact, row.measured_ratio, row.eager_s) == (Status.FITS, None, None, None)
    assert row.predicted_peak_bytes == row.measured_peak_bytes <= row.budget_bytes < row.eager_peak_bytes
    assert row.planned_s > 0
    assert row.note == found.why_not_compared == "not compared with eager, which does not fit in memory"
    assert remarks(found) == []  # the caption says it once
    assert "its ops were measured under a plan" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_either_is_not_run(tight, monkeypatch):
    monkeypatch.setattr(rewriter.memory_need, "usable_bytes", lambda device: 850)
    monkeypatch.setattr(Planned, "seen", lambda *_, **__: pytest.fail("it was run"))
    found = comparison()
    (row,) = found.rows
    assert row.note.startswith("not run: it needs ")
    assert (row.measured_peak_bytes, row.planned_s) == (None, None)
    assert remarks(found) == [f"mutwo at 80%: {row.note}"]


def test_what_a_step_is_made_of_is_known_also_where_it_does_not_fit(tight, capsys):
    assert main(["profile", *SMALL[:4]]) == 0
    assert "measured under a plan" in " ".join(capsys.readouterr().out.split())


def test_accuracy_needs_a_step_that_fits_as_it_is(tight):
    with pytest.raises(OutOfMemory, match="does not fit on this machine as it is"):
        measure_accuracy(SPEC, pairs=1)


def test_a_planned_step_that_runs_out_of_memory_is_a_row_that_says_so(monkeypatch):
    real, calls = Planned.__call__, []

    def fails_once(self, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, batch)

    monkeypatch.setattr(Planned, "__call__", fails_once)
    found = comparison(strategies=["sqrtn", "mutwo"])
    failed, went_well = found.rows
    assert failed.note.startswith("out of memory while proving the planned step")
    assert (failed.exact, went_well.exact) == (None, True)
    assert remarks(found) == [f"sqrtn at 80%: {failed.note}"]


def test_timing_that_runs_out_of_memory_keeps_what_was_proven(monkeypatch):
    def fails(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr("bench.experiments.comparison.planned_steps._time", fails)
    (row,) = comparison().rows
    assert row.exact is True
    assert (row.measured_ratio, row.note) == (None, "out of memory while timing: no room")


def test_a_step_that_runs_out_of_memory_while_it_is_measured_is_one_line(tmp_path, capsys, monkeypatch):
    def fails(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(rewriter.provisional, "measure", fails)
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: out of memory on cpu while measuring the step, also under provisional plans")
    assert len(error.strip().splitlines()) == 1


# -- told before the work -----------------------------------------------------------------------------------------


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
