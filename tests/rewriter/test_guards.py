"""A planned step whose user changes things: hooks, values, parts and precision are noticed and honoured."""

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parametrize

from profiler.errors import CaptureError
from rewriter import checkpoint
from tests.hooks import scales_what_was_accumulated, updates_in_the_backward
from tests.rewriter import tiny
from tests.side_by_side import assert_same, eager, history, seeded

plain = tiny.models.classify


def make(step=plain, *, prepare=lambda model: None, optimizer=tiny.sgd):
    """The small network from its seed, after `prepare`."""

    def made():
        network = tiny.network()
        prepare(network)
        return step, network, optimizer(network), tiny.images(8)

    return seeded(made)


def planned(workload, budget="60%", **options):
    """The workload's step under a budget, without a progress bar."""
    return checkpoint(*workload, budget=budget, **{"strategy": "mutwo", "show_progress": False, **options})


def assert_loop_equals_eager(workload_of, *, between=None, steps=4, **options):
    """A loop with a planned step that recomputes, against one with the user's own."""
    expected = eager(workload_of(), steps=steps, between=between)
    workload = workload_of()
    step = planned(workload, **options)
    assert_same(expected, history(step, workload, steps=steps, between=between))
    assert step.solution.timeline.reruns > 0
    return step


@pytest.fixture(autouse=True)
def _no_warning_unless_expected():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


# -- hooks ------------------------------------------------------------------------------------------------------------


def clamped(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@pytest.mark.parametrize(
    "hooks", [clamped, scales_what_was_accumulated, updates_in_the_backward], ids=lambda hooks: hooks.__name__
)
def test_a_plan_of_a_step_with_hooks_is_proven_and_equals_eager(hooks):
    step = assert_loop_equals_eager(lambda: make(prepare=hooks), verify=True)
    assert step.verification.exact


def test_a_hook_added_between_steps_is_said_and_honoured():
    def between(i, model, optimizer):
        if i == 1:
            model[0].weight.register_hook(lambda gradient: 2 * gradient)

    with pytest.warns(UserWarning, match=r"the gradient hooks of 0\.weight are not those of the captured step") as said:
        assert_loop_equals_eager(make, between=between)
    assert len(said) == 1


# -- values and parts -------------------------------------------------------------------------------------------------


def test_a_schedule_of_dropout_is_said_and_honoured_and_old_forms_are_found_again():
    def between(i, model, optimizer):
        model[3].p = (0.4, 0.2, 0.4, 0.2)[i]

    with pytest.warns(UserWarning, match=r"module 3\.p was 0\.2 and is 0\.4") as said:
        assert_loop_equals_eager(make, between=between)
    assert len(said) == 1


def test_a_variable_of_the_loop_that_the_step_reads_is_said_and_honoured():
    def workload():
        ratio = 0.5

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            loss = ratio * nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            return loss

        def between(i, model, optimizer):
            nonlocal ratio
            ratio = 0.5 if i < 1 else 0.25

        return make(step), between

    own, between = workload()
    expected = eager(own, steps=4, between=between)
    other, between = workload()
    step = planned(other)
    with pytest.warns(UserWarning, match=r"the outer variable ratio was 0\.5 and is 0\.25") as said:
        assert_same(expected, history(step, other, steps=4, between=between))
    assert len(said) == 1


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 2 * weight


def test_a_parametrization_put_on_between_steps_is_said_and_honoured():
    def between(i, model, optimizer):
        if i == 1:
            parametrize.register_parametrization(model[0], "weight", Doubled())

    with pytest.warns(UserWarning, match=r"module 0\.parametrizations is new; parameter 0\.weight is gone") as said:
        assert_loop_equals_eager(make, between=between, budget="80%")
    assert len(said) == 1


def another_layer(model):
    model[-1] = nn.Linear(96, 4)


def assigned_state(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


@pytest.mark.parametrize("change", [another_layer, assigned_state], ids=lambda change: change.__name__)
def test_parameters_that_the_optimizer_does_not_know_are_refused_and_the_old_ones_work_again(change):
    workload = make()
    step = planned(workload)
    step(workload[3])
    kept = dict(workload[1].named_parameters())
    last = workload[1][-1]
    change(workload[1])
    with (
        pytest.warns(UserWarning, match="was replaced by another"),
        pytest.raises(CaptureError, match="make the optimizer anew"),
    ):
        step(workload[3])
    workload[1][-1] = last
    for name, p in kept.items():
        path, _, key = name.rpartition(".")
        setattr(workload[1].get_submodule(path), key, p)
    step(workload[3])


# -- mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [tiny.sgd, lambda model: optim.Adam(model.parameters(), lr=0.01)])
def test_a_step_planned_and_called_inside_autocast_equals_eager_inside_it(optimizer):
    def inside(call):
        def autocast(*args, **options):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return call(*args, **options)

        return autocast

    own, workload = make(optimizer=optimizer), make(optimizer=optimizer)
    expected = history(inside(lambda batch: plain(own[1], own[2], batch)), own, steps=3)
    step = inside(planned)(workload, "75%")
    assert step.solution.timeline.reruns > 0
    assert_same(expected, history(inside(step), workload, steps=3))


def test_a_step_is_proven_inside_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = planned(make(), "75%", verify=3)
    assert step.verification.exact


def test_a_step_planned_outside_autocast_and_called_inside_is_said_and_honoured():
    own, workload = make(), make()
    step = planned(workload, "80%")
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(own[1], own[2], own[3])
    torch.manual_seed(1)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(UserWarning, match=r"autocast on cpu was off and is torch\.bfloat16"),
    ):
        actual = step(workload[3])
    assert torch.equal(expected, actual)
    for p, q in zip(own[1].parameters(), workload[1].parameters(), strict=True):
        assert torch.equal(p, q)


# -- plain values of the batch -----------------------------------------------------------------------------------------


def by_name(model, optimizer, batch):
    loss = plain(model, optimizer, (batch["images"], batch["labels"]))
    return loss * batch["weight"] if "weight" in batch else loss


def named_batches(**plain_values):
    """As many batches as there are values of each name."""
    images, labels = tiny.images(8)
    rows = [dict(zip(plain_values, row, strict=True)) for row in zip(*plain_values.values(), strict=True)]
    return [{"images": images, "labels": labels, **row} for row in rows]


def test_paths_and_indices_that_the_step_never_reads_are_no_reason_to_plan_again():
    step, model, optimizer, _ = make(by_name)
    batches = named_batches(path=["a", "b", "c"], index=[1, 2, 3])
    planned_step = planned((step, model, optimizer, batches[0]))
    for batch in batches:
        planned_step(batch)


def test_a_value_that_the_step_reads_is_planned_anew_and_named_after_the_third_time():
    step, model, optimizer, _ = make(by_name)
    batches = named_batches(weight=[1.0, 2.0, 3.0, 4.0], path=["a", "b", "c", "d"])
    planned_step = planned((step, model, optimizer, batches[0]))
    with pytest.warns(UserWarning, match=r"batch leaf 2 \(batch\['weight'\]\) was \d\.0 and is \d\.0") as said:
        list(map(planned_step, batches))
    assert len(said) == 3
    named = [r"batch['weight'] had another value 3 times or more" in str(one.message) for one in said]
    assert named == [False, False, True]
