"""A learning rate in a trace is found by what it is: no number of the user's is ever taken for it."""

import pytest
import torch
from torch import fx, nn, optim

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import RateSlot
from profiler.tracing.updates.learning_rates import Rate, RatesKept, make_rates_live
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.side_by_side import assert_captured_equals_eager

GOLDEN = 0.6180339887498949

OPTIMIZERS = {
    "SGD": lambda p, lr, decay: optim.SGD(p, lr=lr, momentum=lr, weight_decay=decay, foreach=False),
    "SGD foreach": lambda p, lr, decay: optim.SGD(p, lr=lr, momentum=lr, weight_decay=decay, foreach=True),
    "SGD fused": lambda p, lr, decay: optim.SGD(p, lr=lr, momentum=lr, weight_decay=decay, fused=True),
    "AdamW fused": lambda p, lr, decay: optim.AdamW(p, lr=lr, weight_decay=decay, fused=True),
}


class Scaled(nn.Module):
    """Multiplies by numbers that some learning rate might have."""

    def __init__(self, number):
        super().__init__()
        self.inner, self.number = nn.Linear(6, 4), number

    def forward(self, x):
        return self.inner(x * self.number) / self.number - self.number


def halve(i, model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("number", [GOLDEN, 0.125, 0.5])
def test_numbers_of_the_model_and_the_optimizer_that_equal_the_rate_stay_while_the_rate_changes(kind, number):
    traced = assert_captured_equals_eager(
        small.make(
            model=lambda: Scaled(number),
            optimizer=lambda model: OPTIMIZERS[kind](model.parameters(), number, number),
        ),
        between=halve,
    )
    assert not traced.opaque_reason
    assert {slot.group for slot in traced.convention.inputs if isinstance(slot, RateSlot)} == {0}


@pytest.mark.parametrize("rate", [0.0, 1, True, float("inf")])
def test_a_rate_may_be_any_number(rate):
    traced = assert_captured_equals_eager(
        small.make(optimizer=lambda model: optim.SGD(model.parameters(), lr=rate, foreach=True)), between=halve
    )
    assert not traced.opaque_reason


def test_what_is_computed_from_a_rate_is_computed_anew_from_the_rate_of_the_day():
    rate = Rate.of(2, 0.1)
    formulas = {-rate: -0.3, 1 - rate * 0.5: 1 - 0.3 * 0.5, rate / 4: 0.3 / 4, (2 + rate) ** 2: 2.3**2}
    for made, expected in formulas.items():
        assert (made.group, made.formula(0.3)) == (2, expected)
    assert float(1 - rate * 0.5) == 1 - 0.1 * 0.5


def test_a_decision_by_the_rate_and_a_mixture_of_two_are_refused():
    rate = Rate.of(0, 0.1)
    for decide in (bool, lambda r: r > 0, lambda r: r == 0.1):
        with pytest.raises(CaptureError, match="decides by its learning rate"):
            decide(rate)
    with pytest.raises(CaptureError, match="two groups"):
        rate * Rate.of(1, 0.1)


def test_a_call_that_hides_the_rate_is_refused():
    with pytest.raises(CaptureError, match="hides it"), RatesKept(_graph_of_one_input()):
        torch.add(torch.ones(2), torch.ones(2), alpha=Rate.of(0, 0.1))


def test_each_number_made_of_a_rate_is_one_input():
    graph, rate = _graph_of_one_input(), Rate.of(0, 0.1)
    (x,) = graph.nodes
    made = [graph.call_function(torch.mul, (x, number)) for number in (-rate, rate, -rate, 0.1, -0.1)]
    graph.output(made)
    assert [slot.name for slot in make_rates_live(graph)] == ["minus_lr.0", "lr.0"]
    assert [str(node.args[1]) for node in made] == ["rate_0", "rate_1", "rate_0", "0.1", "-0.1"]


def _graph_of_one_input():
    graph = fx.Graph()
    graph.placeholder("x")
    return graph


# -- read by the step itself ------------------------------------------------------------------------------------------


def returns_its_rate(model, optimizer, batch):
    rate = optimizer.param_groups[0]["lr"]
    return small.step(model, optimizer, batch), rate, {"in percent": 100 * rate, "half": -rate / 2}


def updates_by_its_rate(model, optimizer, batch):
    loss = small.step(model, optimizer, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(optimizer.param_groups[0].get("lr") * p)
    return loss, f"at a rate below {1:.1f}"


@pytest.mark.parametrize("step", [returns_its_rate, updates_by_its_rate])
@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_a_rate_that_the_step_returns_or_computes_with_is_live(step, optimizer):
    def decay(i, model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 2)

    assert_captured_equals_eager(small.make(step, optimizer=optimizer), between=decay)


def test_of_a_rate_that_decides_only_the_outcome_is_assumed():
    def step(model, optimizer, batch):
        loss = small.step(model, optimizer, batch)
        return loss * (2 if optimizer.param_groups[0]["lr"] > 0.03 else 1)

    def decay(i, model, optimizer):
        optimizer.param_groups[0]["lr"] *= 0.5

    assert_captured_equals_eager(small.make(step), between=decay, steps=5, recaptures=1)


@pytest.mark.parametrize("other", [torch.tensor(0.2), 1])
def test_a_returned_rate_that_becomes_something_else_than_a_float_is_noticed(other):
    step, model, optimizer, batch = small.make(returns_its_rate, optimizer=small.adam)()
    traced = capture(step, model, optimizer, batch)
    assert traced.convention.check(batch) == []
    optimizer.param_groups[0]["lr"] = other
    assert traced.convention.check(batch) != []


def test_a_rate_made_into_text_is_the_number_it_is_and_guarded():
    def step(model, optimizer, batch):
        return small.step(model, optimizer, batch), f"{optimizer.param_groups[0]['lr']:.2f}"

    _, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    assert traced.run(batch)[1] == "0.10"
    optimizer.param_groups[0]["lr"] = 0.2
    assert traced.convention.check(batch) != []
