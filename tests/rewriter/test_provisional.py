"""A step that does not fit as it is: measured under a provisional plan, planned, and equal to eager all the same."""

import warnings

import pytest
import torch

import rewriter.provisional
from planner.simulator import simulate, unplanned
from planner.solve import Status
from profiler.measuring.op_times import measure
from rewriter import OverBudget, checkpoint
from rewriter.provisional import needed_bytes, provisional_schedules
from tests.rewriter import tiny
from tests.shared import case_of
from tests.side_by_side import assert_same, history, measured_peak, snapshot


def planned(workload, budget="60%", **options):
    return checkpoint(*workload, budget=budget, strategy="mutwo", show_progress=False, **options)


def limit_of(traced, share):
    peak = unplanned(traced.graph).above_start_bytes
    return traced.graph.start_bytes + int(share * peak)


@pytest.fixture
def little(monkeypatch):
    """A machine with no memory left to speak of."""
    monkeypatch.setattr(rewriter.provisional, "usable_bytes", lambda device: 1000)


@pytest.fixture
def tried(monkeypatch):
    """The schedules that were measured; those wanted to fail run out of memory, as a GPU would."""
    seen, failing = [], []

    def measured(traced, batch, *, schedule, show_progress, host):
        seen.append(schedule)
        if len(seen) <= len(failing):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return measure(traced, batch, schedule=schedule, show_progress=show_progress, host=host)

    monkeypatch.setattr(rewriter.provisional, "measure", measured)
    return seen, failing


def test_what_is_measured_under_a_plan_is_what_is_measured_without(ordinary):
    workload, traced = ordinary, case_of(tiny.plain).captured
    schedule = next(provisional_schedules(traced, limit_of(traced, 0.6)))
    assert simulate(traced.graph, schedule).reruns > 0
    without = measure(traced, workload[3], show_progress=False).graph
    under = measure(traced, workload[3], schedule=schedule, show_progress=False).graph
    assert [s.nbytes for s in under.storages] == [s.nbytes for s in without.storages]
    assert [(op.name, op.workspace_bytes) for op in under.ops] == [(op.name, op.workspace_bytes) for op in without.ops]
    assert all(op.time_us > 0 for op in under.ops)
    assert under.fingerprint == without.fingerprint


def test_measuring_under_a_plan_keeps_within_it_and_changes_nothing(ordinary):
    workload, traced = ordinary, case_of(tiny.plain).captured
    schedule = next(provisional_schedules(traced, limit_of(traced, 0.6)))
    before = snapshot(None, workload[1], workload[2])
    stats = measure(traced, workload[3], schedule=schedule, show_progress=False).stats
    unplanned = measure(traced, workload[3], show_progress=False).stats
    assert max(s.peak_bytes for s in stats) < 0.8 * max(s.peak_bytes for s in unplanned)
    assert_same([before], [snapshot(None, workload[1], workload[2])])


@pytest.mark.usefixtures("little")
def test_a_step_that_does_not_fit_as_it_is_is_planned_under_its_budget_and_equals_eager(ordinary):
    workload, expected = ordinary, case_of(tiny.plain).expected
    with pytest.warns(UserWarning, match="can be had on cpu: its ops are measured under a provisional plan"):
        step = planned(workload)
    assert step.solution.status is Status.FITS
    problem = step.solution.problem
    peak = problem.graph.start_bytes + measured_peak(lambda: step(workload[3]), workload)
    assert peak <= problem.budget_bytes
    assert_same(expected, history(step, workload, steps=3))


def test_running_out_of_memory_unplanned_leads_to_a_provisional_plan(ordinary, tried):
    seen, failing = tried
    failing.append("unplanned")
    with pytest.warns(UserWarning, match="provisional plan"):
        step = planned(ordinary)
    assert seen[0] is None
    assert len(seen) == 2
    assert simulate(step.solution.problem.graph, seen[1]).reruns > 0


def test_running_out_of_memory_under_a_plan_leads_to_a_smaller_one(ordinary, tried):
    seen, failing = tried
    failing += ["unplanned", "first plan"]
    workload = ordinary
    with pytest.warns(UserWarning, match="provisional plan"):
        planned(workload, "80%")
    graph = case_of(tiny.plain).captured.graph
    first, second = (simulate(graph, schedule).peak_bytes for schedule in seen[1:])
    assert second < first


def test_running_out_of_memory_always_is_over_budget_and_changes_nothing(ordinary, tried):
    _, failing = tried
    failing += ["always"] * 10
    workload = ordinary
    before = snapshot(None, workload[1], workload[2])
    with (
        pytest.warns(UserWarning, match="provisional plan"),
        pytest.raises(OverBudget, match=r"out of memory on cpu while measuring .* a smaller batch or a smaller budget"),
    ):
        planned(workload, "80%")
    assert_same([before], [snapshot(None, workload[1], workload[2])])


@pytest.mark.usefixtures("little")
def test_a_budget_below_all_tensors_is_over_budget_with_the_floor(ordinary):
    with (
        pytest.warns(UserWarning, match="provisional plan"),
        pytest.raises(OverBudget, match=r"no plan fits .* No plan at all can go under .* of op"),
    ):
        planned(ordinary, "2%")


@pytest.mark.usefixtures("little")
def test_where_eager_would_not_fit_the_plan_is_unproven_and_says_so(ordinary):
    with pytest.warns(UserWarning, match="provisional plan") as said:
        step = planned(ordinary, verify=True)
    assert "this plan is unproven: your own step does not fit in memory" in str(said[-1].message)
    assert "unproven: your own step does not fit in memory" in str(step.solution)
    assert step.verification is None


def test_any_other_failure_while_measuring_stays_what_it_is(ordinary, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(rewriter.provisional, "measure", broken)
    with pytest.raises(RuntimeError, match="something else"):
        planned(ordinary)


def test_what_measuring_needs_counts_the_copies_on_the_cpu_only():
    graph = case_of(tiny.plain).captured.graph
    on_cpu, on_gpu = (needed_bytes(graph, torch.device(name)) for name in ("cpu", "cuda"))
    assert on_cpu - on_gpu == graph.start_bytes


def test_where_the_step_fits_nothing_is_said(ordinary):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(ordinary).solution.status is Status.FITS
