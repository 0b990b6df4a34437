"""state_kept: whatever is done inside, afterwards there is no trace of it."""

import random
import unittest.mock

import numpy as np
import pytest
import torch
from torch import nn, optim

from profiler.measuring.restoring import state_kept
from tests import step_forms
from tests.profiler import small


def contents(model, optimizer):
    """Identities and values of everything that a step touches."""
    tensors = {f"param {n}": p for n, p in model.named_parameters()}
    tensors |= {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"buffer {n}": b for n, b in model.named_buffers()}
    for i, (p, state) in enumerate(optimizer.state.items()):
        tensors |= {f"state {i} {id(p)} {key}": value for key, value in state.items()}
    return {
        "tensors": {k: (id(t), t.tolist() if isinstance(t, torch.Tensor) else t) for k, t in tensors.items()},
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "params": [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "optimizer": sorted(vars(optimizer)),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


def draw_everywhere():
    random.random()
    np.random.rand(2)
    torch.rand(2)


@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_steps_inside_leave_no_trace(optimizer, steps_before):
    step, model, optimizer, batch = small.make(optimizer=optimizer)()
    for _ in range(steps_before):
        step(model, optimizer, batch)
    before = contents(model, optimizer)
    with state_kept(model, optimizer):
        for _ in range(3):
            step(model, optimizer, batch)
        model.eval()
        optimizer.param_groups[0]["lr"] = 7.0
        draw_everywhere()
        assert contents(model, optimizer) != before
    assert contents(model, optimizer) == before


def test_gradients_come_back_as_the_very_tensors_they_were():
    step, model, optimizer, batch = small.make()()
    step(model, optimizer, batch)
    model[4].bias.grad = None
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: g.clone() for n, g in gradients.items() if g is not None}
    with state_kept(model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()  # in place: the tensor stays, its numbers go
        step(model, optimizer, batch)
    for name, p in model.named_parameters():
        assert p.grad is gradients[name]
        assert p.grad is None or torch.equal(p.grad, values[name])


def test_an_error_inside_leaves_no_trace_and_comes_through():
    step, model, optimizer, batch = small.make(optimizer=small.adam)()
    before = contents(model, optimizer)

    def fail_after_a_step():
        with state_kept(model, optimizer):
            step(model, optimizer, batch)
            draw_everywhere()
            raise ArithmeticError("half-way")

    with pytest.raises(ArithmeticError, match="half-way"):
        fail_after_a_step()
    assert contents(model, optimizer) == before
    assert not optimizer.state


def test_a_replaced_buffer_is_put_back():
    step, model, optimizer, batch = small.make(model=step_forms.RunningMean)()
    mean = model.mean
    with state_kept(model, optimizer):
        step(model, optimizer, batch)
        assert model.mean is not mean
    assert model.mean is mean
    assert not mean.any()


def test_what_an_optimizer_counts_in_its_groups_and_itself_is_put_back():
    class Counting(optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01, "k": 0})
            self.calls = 0

        @torch.no_grad()
        def step(self):
            self.calls += 1
            for group in self.param_groups:
                group["k"] += 1
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])

    step, model, optimizer, batch = small.make(optimizer=lambda model: Counting(model.parameters()))()
    group = optimizer.param_groups[0]
    with state_kept(model, optimizer):
        step(model, optimizer, batch)
        assert (optimizer.calls, group["k"]) == (1, 1)
    assert (optimizer.calls, group["k"]) == (0, 0)
    assert optimizer.param_groups[0] is group


def test_a_parameter_that_only_the_optimizer_knows_is_put_back():
    scale = nn.Parameter(torch.ones(3))
    model = nn.Linear(2, 2)
    optimizer = optim.SGD([*model.parameters(), scale], lr=1.0)
    with state_kept(model, optimizer), torch.no_grad():
        scale.mul_(5)
        scale.grad = torch.ones(3)
    assert scale.tolist() == [1.0, 1.0, 1.0]
    assert scale.grad is None


def test_the_users_own_generators_are_put_back_where_they_are_named():
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    model = nn.Linear(2, 2)
    with state_kept(model, small.sgd(model), generators=[generator]):
        torch.rand(5, generator=generator)
        assert not torch.equal(generator.get_state(), state)
    assert torch.equal(generator.get_state(), state)


def misshapen(model):
    """What a step may do to tensors beside writing values: shape, size, memory and type."""
    model.shrunk.resize_(2)
    model.grown.resize_(9, 9)
    model.other.data = torch.ones(3)
    model.cast.data = model.cast.data.to(torch.float64)
    model.emptied.untyped_storage().resize_(0)


def test_what_changed_shape_type_or_memory_is_put_back_as_it_was_and_all_the_rest_too():
    model = nn.Linear(3, 2)
    names = ("shrunk", "grown", "other", "cast", "emptied")
    for name in names:
        model.register_buffer(name, torch.arange(6.0).view(2, 3).t())
    optimizer = small.sgd(model)
    before = contents(model, optimizer)
    pointers = {name: getattr(model, name).data_ptr() for name in names[2:4]}
    with state_kept(model, optimizer), torch.no_grad():
        misshapen(model)
        model.weight.mul_(2)
        draw_everywhere()
    assert contents(model, optimizer) == before
    for name in names:
        assert getattr(model, name).stride() == (1, 3)
    assert {name: getattr(model, name).data_ptr() for name in pointers} == pointers


def test_one_thing_that_cannot_be_put_back_does_not_keep_the_others_from_it():
    model, generator = nn.Linear(3, 2), torch.Generator()
    weight = model.weight.detach().clone()
    failing = unittest.mock.Mock(wraps=generator)
    failing.get_state.return_value = generator.get_state()
    failing.set_state.side_effect = RuntimeError("stubborn")

    def change():
        with state_kept(model, small.sgd(model), generators=[failing]), torch.no_grad():
            model.weight.mul_(2)

    with pytest.raises(RuntimeError, match="stubborn"):
        change()
    assert torch.equal(model.weight, weight)
