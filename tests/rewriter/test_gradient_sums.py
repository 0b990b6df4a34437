"""Tensors that a planned forward reads several times: autograd adds up their gradients in eager's order, to the bit."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.measuring.meters import CpuMeter, peak_above_start
from rewriter import checkpoint_model
from rewriter.proof import same_bits
from rewriter.ways.common import Way

ROWS = torch.randn(12, 64, 32, generator=torch.Generator().manual_seed(0))


class Reading(nn.Module):
    """Reads weights at several places: tied ones, a layer called again, one view twice, one with a shared gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.again, self.last = (nn.Linear(32, 32) for _ in range(4))
        self.second.weight = self.first.weight
        self.place = nn.Parameter(torch.randn(64, 32))
        self.view = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x):
        hidden = F.gelu(self.first(x) + self.place)
        hidden = F.gelu(self.second(hidden)) + hidden
        turned = self.view.t()
        for _ in range(3):
            hidden = F.gelu(self.again(hidden) @ turned) + self.place
        return self.last(F.dropout(hidden, 0.1)) + self.place


def penalty(model):
    return sum((p * p * 0.37).sum() for p in model.parameters())


def nothing_else(model, i):
    model(ROWS[i]).pow(2).mean().backward()


def penalty_before(model, i):
    before = penalty(model)
    (model(ROWS[i]).pow(2).mean() + before).backward()


def penalty_after(model, i):
    (model(ROWS[i]).pow(2).mean() + penalty(model)).backward()


def penalty_on_both_sides(model, i):
    before, loss = penalty(model), model(ROWS[i]).pow(2).mean()
    (before + loss + penalty(model).sqrt()).backward()


def two_forwards_and_a_penalty_between(model, i):
    first, between = model(ROWS[i]).pow(2).mean(), penalty(model)
    (first + model(ROWS[i + 1]).sin().mean() + between).backward()


def one_forward_after_the_other(model, i):
    hidden = model(ROWS[i])
    (model(hidden).pow(2).mean() + hidden.sin().mean() + penalty(model)).backward()


def a_kept_graph(model, i):
    loss = model(ROWS[i]).pow(2).mean() + penalty(model)
    loss.backward(retain_graph=True)
    loss.backward()


def an_input_that_others_read(model, i):
    given = ROWS[i].clone().requires_grad_()
    scaled = given * 1.1
    (model(scaled).pow(2).mean() + (scaled * scaled).sum() * 0.3 + penalty(model)).backward()
    model.place.grad.add_(given.grad)


def hooks_on_weights(model, i):
    hooks = [p.register_hook(lambda gradient: gradient * 1.3) for p in model.parameters()]
    penalty_after(model, i)
    for hook in hooks:
        hook.remove()


def by_autograd_grad(model, i):
    asked = list(model.parameters())
    found = torch.autograd.grad(model(ROWS[i]).pow(2).mean() + penalty(model), asked)
    for p, gradient in zip(asked, found, strict=True):
        p.grad = gradient if p.grad is None else p.grad + gradient


LOOPS = [
    penalty_before, penalty_after, penalty_on_both_sides, two_forwards_and_a_penalty_between,
    one_forward_after_the_other, a_kept_graph, an_input_that_others_read, hooks_on_weights, by_autograd_grad,
]  # fmt: skip


def pair_of(**options):
    torch.manual_seed(0)
    eager = Reading()
    planned = copy.deepcopy(eager)
    return eager, checkpoint_model(planned, budget="80%", strategy="mutwo", **options)


def gradients_of(model, loop, *, accumulate):
    optimizer, seen = optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), []
    optimizer.zero_grad()
    torch.manual_seed(1)
    for i in range(4):
        loop(model, i)
        seen += [p.grad.clone() for p in model.parameters()]
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def assert_sums_equally(eager, planned, loop, *, accumulate):
    pair = [gradients_of(model, loop, accumulate=accumulate) for model in (eager, planned)]
    assert all(map(same_bits, *pair)), loop.__name__


@pytest.fixture(scope="module")
def reading():
    eager, planned = pair_of()
    assert_sums_equally(eager, planned, nothing_else, accumulate=1)
    assert planned.planned.timeline().reruns > 0
    return eager, planned


@pytest.mark.filterwarnings("ignore:outputs .* of the planned model are held")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_what_else_is_added_to_a_gradient_comes_between_its_parts_as_in_eager(reading, loop, accumulate):
    assert_sums_equally(*reading, loop, accumulate=accumulate)
    assert reading[1].planned.way is Way.OWN_CAPTURE


def test_the_peak_is_predicted_though_the_engine_adds(reading):
    planned = reading[1]
    nothing_else(planned, 0)
    planned.zero_grad()
    nothing_else(planned, 0)
    planned.zero_grad()
    measured = peak_above_start(CpuMeter(), lambda: nothing_else(planned, 0))
    planned.zero_grad()
    predicted = planned.planned.timeline().above_start_bytes
    assert abs(measured - predicted) <= 0.01 * predicted


def test_through_dynamo_as_well():
    torch._dynamo.reset()
    eager, planned = pair_of(dynamic=True)
    reruns = 0
    for loop in (penalty_on_both_sides, two_forwards_and_a_penalty_between, an_input_that_others_read, a_kept_graph):
        assert_sums_equally(eager, planned, loop, accumulate=1)
        reruns += planned.planned.timeline().reruns  # of the way that the loop took: the budget is for the largest
    assert planned.planned.way is Way.DYNAMO
    assert reruns > 0
