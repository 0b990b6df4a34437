"""Batches of changing sizes: each size is captured once, and learns from those that were measured and planned."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from planner.analysis import candidates
from planner.ir import TimingKind
from planner.plan import recompute_once
from planner.scaling import in_proportion, with_times_of
from planner.solve import Problem, Status, solve
from planner.synthetic import transformer
from rewriter import checkpoint, checkpoint_model, other_shapes, pipeline, provisional
from rewriter.given_plan import GivenPlan
from rewriter.other_shapes import BYTES_AN_OP, carried_over, kept
from rewriter.proof import same_bits
from tests.rewriter import tiny

LENGTHS = (16, 12, 9, 14, 10, 15, 11, 8, 13, 7)


@pytest.fixture
def counted(monkeypatch):
    """How often steps were captured and measured."""
    counts = {"captured": 0, "measured": 0}

    def counting(name, real):
        def call(*args, **kwargs):
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(pipeline, "capture", counting("captured", pipeline.capture))
    monkeypatch.setattr(provisional, "measure", counting("measured", provisional.measure))
    return counts


def of_length(batch, length):
    return {name: tensor[:, :length] for name, tensor in batch.items()}


def gpt2():
    torch.manual_seed(0)
    step, model, optimizer, batch = tiny.gpt2(n_layer=1)
    return step, model.train(), optimizer, batch


def test_ten_lengths_through_epochs_of_a_planned_model_are_captured_once_each_and_measured_once(counted):
    def epochs(model, optimizer, batch):
        torch.manual_seed(1)
        losses = []
        for _ in range(2):
            for length in LENGTHS:
                loss = model(**of_length(batch, length)).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            seen.append(dict(counted))
        return losses

    seen = []
    _, eager, _, batch = gpt2()
    planned = copy.deepcopy(eager)
    expected = epochs(eager, optim.SGD(eager.parameters(), lr=0.05), batch)
    seen.clear()
    checkpoint_model(planned, budget="70%", strategy="mutwo")
    assert epochs(planned, optim.SGD(planned.parameters(), lr=0.05), batch) == expected
    assert all(map(same_bits, eager.state_dict().values(), planned.state_dict().values()))
    # The first step of all is only watched, so that its length is captured when it comes again.
    assert seen[0]["captured"] == len(LENGTHS) - 1
    assert seen[1]["captured"] == len(LENGTHS)
    assert counted["measured"] <= 2
    assert planned.planned.solution.problem.graph.timing.kind is TimingKind.ESTIMATED
    assert planned.planned.verification.exact
    form = planned.planned.taken.form
    assert (
        form.ready.graph.start_bytes + form.verification.measured_peak_bytes
        <= form.solution.problem.budget_bytes * 1.01
    )


def test_a_step_takes_lengths_from_each_other_too(counted):
    step, model, optimizer, batch = gpt2()
    own = gpt2()
    planned = checkpoint(step, model, optimizer, batch, budget="70%", strategy="mutwo", show_progress=False)
    for length in (16, 12, 8, 16, 12, 8):
        torch.manual_seed(length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found = planned(of_length(batch, length))
        torch.manual_seed(length)
        assert same_bits(found, own[0](own[1], own[2], of_length(batch, length)).detach())
    assert counted == {"captured": 3, "measured": 1}
    assert "proven equal to the bit" in str(planned.solution)


def test_a_shape_that_needs_more_than_was_estimated_is_measured_after_all(counted, monkeypatch):
    real = other_shapes.with_times_of

    def without_workspaces(graph, measured):
        found = real(graph, measured)
        small = tuple(replace(s, nbytes=s.nbytes // 2) if found.maker[s.id] is not None else s for s in found.storages)
        return replace(found, storages=small)

    monkeypatch.setattr(other_shapes, "with_times_of", without_workspaces)
    step, model, optimizer, batch = gpt2()
    largest = 60_000 + sum(p.nbytes for p in model.parameters()) * 3
    planned = checkpoint(
        step, model, optimizer, of_length(batch, 8), budget="75%", strategy="mutwo", show_progress=False
    )
    planned._settings = replace(planned._settings, budget=max(largest, planned.solution.timeline.peak_bytes))
    with pytest.warns(UserWarning, match="captured and planned anew"):
        planned(of_length(batch, 9))
    assert counted["measured"] == 2
    assert planned.solution.problem.graph.timing.kind is TimingKind.MEASURED


# -- plans ------------------------------------------------------------------------------------------------------------


def problem_of(graph, share):
    return Problem.of(graph, f"{share}%")


def never(problem):
    raise AssertionError("planned anew")


def all_dropped(graph):
    return GivenPlan(recompute_once(graph, candidates(graph)))


def test_a_plan_that_fits_another_shape_and_leaves_little_to_gain_is_carried_over():
    graph = transformer(6)
    first = solve(problem_of(graph, 60), other_shapes.strategies.make("mutwo"))
    larger = problem_of(in_proportion(graph, 1.5), 60)
    found = carried_over(larger, [first], never)
    assert found.status is Status.FITS
    assert found.plan.evictions == first.plan.evictions


def test_a_plan_that_costs_far_more_than_need_be_is_not_carried_over():
    graph = transformer(6)
    wasteful = solve(problem_of(graph, 60), all_dropped(graph))
    asked = []

    def anew(problem):
        asked.append(problem)
        return solve(problem, other_shapes.strategies.make("mutwo"))

    problem = problem_of(in_proportion(graph, 1.5), 90)
    assert carried_over(problem, [wasteful], anew).timeline.extra_us < wasteful.timeline.extra_us
    assert asked == [problem]


def test_a_plan_of_another_step_is_not_looked_at():
    other = solve(problem_of(transformer(5), 60), other_shapes.strategies.make("mutwo"))
    with pytest.raises(AssertionError, match="planned anew"):
        carried_over(problem_of(transformer(6), 60), [other], never)


def test_forms_are_kept_within_bytes_or_up_to_a_number_and_a_few_anyway():
    graph = transformer(6)
    forms, each = list(range(20)), BYTES_AN_OP * len(graph.ops)
    assert kept(forms, lambda _: graph, most=3, most_bytes=10**12) == [0, 1, 2]
    assert kept(forms, lambda _: graph, most=None, most_bytes=12 * each) == list(range(12))
    assert kept(forms, lambda _: graph, most=None, most_bytes=0) == list(range(8))


def test_an_op_whose_tensors_shrink_is_taken_to_be_faster():
    graph = transformer(6)
    half = in_proportion(graph, 0.5)
    assert with_times_of(half, graph).time_us == pytest.approx(0.5 * graph.time_us, rel=0.2)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))


def test_a_share_is_of_the_first_batch_so_that_a_small_last_one_fits_in_it():
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss

    model = chain()
    first, last = torch.randn(512, 32), torch.randn(4, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = checkpoint(step, model, optimizer, first, budget="70%", strategy="mutwo", show_progress=False)
    given = planned.solution.problem.budget_bytes
    with pytest.warns(UserWarning, match="captured and planned anew"):
        planned(last)
    assert planned.solution.problem.unplanned.peak_bytes <= given
    assert planned.solution.timeline.reruns == 0


def test_a_share_is_of_the_first_batch_for_a_planned_model_too():
    model = checkpoint_model(chain(), budget="70%", strategy="mutwo")
    for rows in (512, 512, 4, 4):
        model.zero_grad()
        model(torch.randn(rows, 32)).pow(2).mean().backward()
    assert model.planned.solution.timeline.reruns == 0
