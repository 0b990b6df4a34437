"""A step without its optimizer: forward and backward are planned, and whatever steps the parameters stays alive."""

import copy

import pytest
import torch
from torch import optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.errors import CaptureError
from rewriter import checkpoint
from rewriter.proof import same_bits
from tests.rewriter import tiny


def forward_backward(model, optimizer, batch):
    assert optimizer is None
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss


def micro_step(model, optimizer, batch):
    """Begins with the gradients of the step before, and ends without any."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    model.zero_grad()
    return loss


@pytest.fixture(scope="module")
def planned():
    torch.manual_seed(0)
    model, batch = tiny.network(), tiny.images(8)
    step = checkpoint(forward_backward, model, None, batch, budget="60%", strategy="mutwo", show_progress=False)
    return step, model, batch


def twin(model):
    torch.manual_seed(1)
    return copy.deepcopy(model)


def assert_equal(model, other):
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same_bits(p, q), name
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or same_bits(p.grad, q.grad), name
    for (name, b), c in zip(model.named_buffers(), other.buffers(), strict=True):
        assert same_bits(b, c), name


def test_it_is_proven_leaves_gradients_and_nothing_else(planned):
    step, model, batch = planned
    assert step.verification.exact
    assert step.solution.timeline.reruns > 0
    other = twin(model)
    torch.manual_seed(5)
    expected = forward_backward(other, None, batch)
    torch.manual_seed(5)
    assert torch.equal(step(batch), expected)
    assert_equal(model, other)
    model.zero_grad()


def test_two_optimizers_step_around_it(planned):
    step, model, batch = planned
    other = twin(model)
    torch.manual_seed(2)
    seen = [trained(other, lambda b: forward_backward(other, None, b), batch)]
    torch.manual_seed(2)
    seen.append(trained(model, step, batch))
    assert seen[0] == seen[1]
    assert_equal(model, other)
    model.zero_grad()


def trained(model, call, batch):
    half = len(list(model.parameters())) // 2
    params = list(model.parameters())
    optimizers = [optim.SGD(params[:half], lr=0.1), optim.Adam(params[half:], lr=0.01)]
    losses = []
    for _ in range(3):
        losses.append(call(batch).item())
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_the_closure_of_lbfgs_may_call_it(planned):
    step, model, batch = planned
    other = twin(model)

    def closing(call, net):
        optimizer = optim.LBFGS(net.parameters(), max_iter=3)

        def closure():
            optimizer.zero_grad()
            return call(batch)

        torch.manual_seed(3)
        return [optimizer.step(closure).item() for _ in range(2)]

    assert closing(lambda b: forward_backward(other, None, b), other) == closing(step, model)
    assert_equal(model, other)
    model.zero_grad()


def test_a_gradient_scaler_decides_outside_of_it():
    def loop(net, wrap):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), optim.SGD(net.parameters())

        def scaled(model, _, batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(batch[0]), batch[1])
            scaler.scale(loss).backward()
            return loss

        call, scales = wrap(scaled, net), []
        torch.manual_seed(6)
        for i in range(4):
            call(tuple(batch) if i != 1 else (batch[0] * float("inf"), batch[1]))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    torch.manual_seed(0)
    model, batch = tiny.network(), tiny.images(8)
    other = twin(model)
    options = {"budget": "70%", "strategy": "mutwo", "show_progress": False}
    expected = loop(other, lambda step, net: lambda b: step(net, None, b))
    assert loop(model, lambda step, net: checkpoint(step, net, None, batch, **options)) == expected
    assert expected == [16.0, 8.0, 16.0, 32.0]  # the infinite step was left out
    assert_equal(model, other)


def test_gradients_that_are_there_are_added_to(planned):
    step, model, batch = planned
    other = twin(model)
    torch.manual_seed(4)
    for _ in range(2):
        forward_backward(other, None, batch)
    torch.manual_seed(4)
    step(batch)
    with pytest.warns(UserWarning, match="was None when the step began"):
        step(batch)
    assert_equal(model, other)
    model.zero_grad()


def test_a_micro_step_that_begins_with_gradients_and_clears_them_is_proven():
    torch.manual_seed(0)
    model, batch = tiny.network(), tiny.images(8)
    forward_backward(model, None, batch)
    step = checkpoint(micro_step, model, None, batch, budget="70%", strategy="mutwo", show_progress=False)
    assert step.verification.exact
    step(batch)
    assert all(p.grad is None for p in model.parameters())


def test_early_updates_without_an_optimizer_are_refused():
    with pytest.raises(CaptureError, match="early updates need"):
        checkpoint(forward_backward, tiny.network(), None, tiny.images(8), budget="60%", early_updates=True)
