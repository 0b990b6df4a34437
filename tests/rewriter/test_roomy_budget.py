"""A budget at or above the step's own peak: nothing is recomputed, and the measured peak is still within it."""

import pytest

import rewriter.pipeline
from planner.solve import Status
from rewriter import OverBudget
from tests.rewriter import tiny
from tests.rewriter.test_checkpoint import adam, make, planned
from tests.shared import case_of
from tests.side_by_side import assert_same, snapshot


class Stubborn:
    """Finds nothing to drop: only a step that needs no plan gets by."""

    name = "stubborn"

    def plan(self, problem):
        raise AssertionError("no strategy is asked when there is nothing to do")


def peaks(workload):
    """The simulated and the measured peak of the unplanned step, and what is live before it."""
    step = planned(workload, "1TiB", verify=2)
    unplanned, start = step.solution.problem.unplanned, step.solution.problem.graph.start_bytes
    return unplanned.peak_bytes, start + step.verification.measured_peak_bytes, start


def fudge_measured(monkeypatch, extra_bytes):
    """Let the measured peak of the unplanned step be higher than it is."""
    real = rewriter.pipeline._measured_unplanned_bytes

    def fudged(*args, **options):
        return real(*args, **options) + extra_bytes

    monkeypatch.setattr(rewriter.pipeline, "_measured_unplanned_bytes", fudged)


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize(
    ("name", "budget"), [("resnet", "100%"), ("resnet", "150%"), ("vit", "100%"), ("gpt2", "100%")]
)
def test_a_share_of_all_or_more_runs_unplanned(name, budget):
    step = planned(case_of(tiny.ZOO[name]).workload, budget, strategy=Stubborn(), verify=2)
    solution = step.solution
    assert solution.status is Status.FITS
    assert solution.timeline.reruns == 0
    assert solution.reason.startswith("nothing to do: the step's own peak of")
    start = solution.problem.graph.start_bytes
    assert start + step.verification.measured_peak_bytes <= solution.problem.budget_bytes


def with_adam():
    return make(optimizer=adam)


@pytest.mark.usefixtures("captured_once")
@pytest.mark.parametrize("workload_of", [tiny.plain, with_adam], ids=["sgd", "adam"])
def test_a_budget_in_bytes_of_just_the_peak_runs_unplanned_if_the_measured_one_is_within(workload_of):
    workload = case_of(workload_of).workload
    simulated, measured, _ = peaks(workload)
    step = planned(workload, max(simulated, measured), strategy=Stubborn(), verify=2)
    assert step.solution.timeline.reruns == 0
    assert step.solution.problem.budget_bytes == max(simulated, measured)


def test_a_budget_far_above_the_peak_is_not_measured_first(ordinary, monkeypatch):
    monkeypatch.setattr(rewriter.pipeline, "observe", lambda *_, **__: pytest.fail("measured"))
    assert planned(ordinary, "102%", strategy=Stubborn(), verify=False).solution.timeline.reruns == 0


def test_a_budget_in_bytes_that_the_measured_peak_exceeds_is_planned_for(ordinary, monkeypatch):
    simulated, _, start = peaks(ordinary)
    fudge_measured(monkeypatch, extra_bytes=(simulated - start) // 400)
    step = planned(ordinary, simulated, strategy="mutwo", verify=2)
    assert step.solution.timeline.reruns > 0
    assert start + step.verification.measured_peak_bytes <= simulated


def test_all_of_the_step_means_all_that_was_measured(ordinary, monkeypatch):
    simulated, _, start = peaks(ordinary)
    extra = (simulated - start) // 400
    fudge_measured(monkeypatch, extra_bytes=extra)
    step = planned(ordinary, "100%", strategy=Stubborn())
    assert step.solution.timeline.reruns == 0
    assert step.solution.problem.budget_bytes >= simulated + extra - 1


def test_measuring_first_leaves_everything_as_it_was(ordinary):
    _, model, optimizer, _ = ordinary
    before = snapshot(None, model, optimizer)
    planned(ordinary, "100%", strategy=Stubborn())
    assert_same([before], [snapshot(None, model, optimizer)])
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def test_the_saved_plan_of_a_step_with_nothing_to_do_is_taken_at_the_same_budget(ordinary, tmp_path):
    planned(ordinary, "100%").save(tmp_path / "plan.json")
    again = planned(ordinary, "100%", plan=tmp_path / "plan.json", strategy=Stubborn())
    assert again.solution.strategy == "plan file"
    assert again.solution.timeline.reruns == 0


def test_below_the_peak_a_strategy_is_asked_and_its_margin_kept(ordinary):
    step = planned(ordinary, "99%")
    solution = step.solution
    assert solution.timeline.reruns > 0
    assert solution.timeline.peak_bytes <= solution.problem.budget_bytes
    with pytest.raises(OverBudget):
        planned(ordinary, "99%", strategy="keep_all")
