"""Hooks on parameters and modules are part of the step: the same bits as eager, and noticed when they change."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.without_memory import without_memory
from profiler.tracing.whole_step import capture
from tests.hooks import scales_what_was_accumulated, updates_in_the_backward
from tests.profiler import small
from tests.profiler.small import op_named
from tests.side_by_side import assert_captured_equals_eager

BOTH = pytest.mark.parametrize("optimizer", [small.sgd, small.adam])


def scales(model):
    model[0].weight.register_hook(lambda gradient: gradient * 0.3)


def returns_nothing(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: None)


def two_in_their_order(model):
    model[0].weight.register_hook(lambda gradient: gradient * 0.3)
    model[0].weight.register_hook(lambda gradient: gradient + 0.01)


def clamps_all(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def writes_in_place(model):
    def double(gradient):
        gradient.mul_(2)

    model[4].weight.register_hook(double)


def replaces_what_was_accumulated(model):
    def halve(p):
        p.grad = p.grad * 0.5

    model[0].weight.register_post_accumulate_grad_hook(halve)


def of_modules(model):
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[3].register_forward_hook(lambda module, args, out: out + 0.1)
    model[4].register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))


HOOKS = [
    scales,
    returns_nothing,
    two_in_their_order,
    clamps_all,
    writes_in_place,
    scales_what_was_accumulated,
    replaces_what_was_accumulated,
    updates_in_the_backward,
    of_modules,
]


def hooked(put):
    """A maker of the small network with hooks."""

    def model():
        network = small.mlp()
        put(network)
        return network

    return model


@BOTH
@pytest.mark.parametrize("put", HOOKS, ids=lambda put: put.__name__)
def test_hooks_give_the_bits_of_eager(put, optimizer):
    assert_captured_equals_eager(small.make(model=hooked(put), optimizer=optimizer))


def accumulates(model, optimizer, batch):
    optimizer.zero_grad()
    for images, labels in zip(batch[0].chunk(3), batch[1].chunk(3), strict=True):
        nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()


@pytest.mark.parametrize("put", [scales, scales_what_was_accumulated], ids=lambda put: put.__name__)
def test_hooks_run_at_each_backward_of_micro_batches(put):
    assert_captured_equals_eager(small.make(accumulates, model=hooked(put)))


def never_clears(model, optimizer, batch):
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize("put", [scales, scales_what_was_accumulated], ids=lambda put: put.__name__)
def test_hooks_see_gradients_that_add_up_from_step_to_step(put):
    assert_captured_equals_eager(small.make(never_clears, model=hooked(put)), recaptures=1)


@pytest.mark.parametrize("put", [clamps_all, scales_what_was_accumulated], ids=lambda put: put.__name__)
def test_hooks_come_before_early_updates(put):
    assert_captured_equals_eager(small.make(model=hooked(put)), early_updates=True)


def test_a_hook_on_a_tied_parameter_runs_on_the_sum_of_its_gradients():
    def tied():
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4))
        model[2].weight = model[0].weight
        model[0].weight.register_hook(lambda gradient: gradient * gradient.abs())
        return model

    assert_captured_equals_eager(small.make(model=tied))


def test_the_work_of_a_hook_is_in_the_graph():
    traced = capture(*small.make(model=hooked(clamps_all))())
    assert op_named(traced, "clamp").phase.value == "backward"


def test_the_hook_of_a_frozen_parameter_never_runs():
    ran = []

    def frozen():
        model = small.mlp()
        model[0].weight.register_hook(ran.append)
        model[0].requires_grad_(False)
        return model

    assert_captured_equals_eager(small.make(model=frozen))
    assert not ran


def test_capture_leaves_the_hooks_as_they_are():
    _, model, optimizer, batch = small.make(model=hooked(two_in_their_order))()
    hooks = dict(model[0].weight._backward_hooks)
    capture(small.step, model, optimizer, batch)
    assert dict(model[0].weight._backward_hooks) == hooks
    assert all(not p._backward_hooks for p in list(model.parameters())[1:])


def test_a_hook_runs_once_for_each_backward_also_where_a_step_of_fake_tensors_is_traced_twice():
    seen = Mock(return_value=None)  # whose calls capture does not put back

    def counts(model):
        model[0].weight.register_hook(lambda gradient: seen(tuple(gradient.shape)))

    def zeroes(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=False)
        never_clears(model, optimizer, batch)

    with without_memory():
        _, model, optimizer, batch = small.make(model=hooked(counts))()
    capture(zeroes, model, optimizer, batch)
    assert [call.args for call in seen.mock_calls] == [((8, 6),)] * 2  # one backward in each of two traces


def test_a_value_that_a_hook_reads_is_assumed_and_told_by_its_line_where_it_differs():
    def reads(model):
        model[0].weight.register_hook(lambda gradient: gradient * gradient.norm().item())  # the line of the hook

    step, model, optimizer, batch = small.make(model=hooked(reads))()
    traced = capture(step, model, optimizer, batch)
    weights = model[0].weight.clone()
    with pytest.raises(CaptureError, match="the line of the hook"):
        traced.run((3 * batch[0], batch[1]))
    assert torch.equal(weights, model[0].weight)


def add(model, handle):
    model[0].weight.register_hook(lambda gradient: gradient * 2)


def add_once_accumulated(model, handle):
    def double(p):
        p.grad.mul_(2)

    model[0].weight.register_post_accumulate_grad_hook(double)


def remove(model, handle):
    handle.remove()


def replace(model, handle):
    handle.remove()
    model[4].bias.register_hook(lambda gradient: gradient * 4)


def add_forward(model, handle):
    model[4].register_forward_hook(lambda module, args, out: out * 2)


def add_forward_before(model, handle):
    model[4].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def add_backward(model, handle):
    model[4].register_full_backward_hook(lambda module, before, after: (before[0] * 2,))


def add_backward_before(model, handle):
    model[4].register_full_backward_pre_hook(lambda module, after: (after[0] * 2,))


CHANGES = {
    add: "the gradient hooks of 0.weight are not those of the captured step",
    add_once_accumulated: "the gradient hooks of 0.weight are not those of the captured step",
    remove: "the gradient hooks of 4.bias are not those of the captured step",
    replace: "the gradient hooks of 4.bias are not those of the captured step",
    add_forward: "the hooks of module 4 are not those of the captured step",
    add_forward_before: "the hooks of module 4 are not those of the captured step",
    add_backward: "the hooks of module 4 are not those of the captured step",
    add_backward_before: "the hooks of module 4 are not those of the captured step",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_hook_is_noticed_and_honoured_by_the_next_capture(change):
    handles = {}

    def with_handle():
        model = small.mlp()
        handles[model] = model[4].bias.register_hook(lambda gradient: gradient * 3)
        return model

    def between(i, model, optimizer):
        if i == 0:
            change(model, handles[model])

    step, model, optimizer, batch = small.make(model=with_handle)()
    traced = capture(step, model, optimizer, batch)
    assert traced.convention.check(batch) == []
    change(model, handles[model])
    assert traced.convention.check(batch) == [CHANGES[change]]
    assert_captured_equals_eager(small.make(model=with_handle), between=between, recaptures=1)
