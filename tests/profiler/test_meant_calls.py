"""A function of torch's that somebody replaced is applied as often as in eager: once."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.errors import CaptureError
from profiler.tracing.whole_step import capture
from tests.profiler import small


def wrapped(function):
    @functools.wraps(function)
    def twice(*args, **kwargs):
        return function(*args, **kwargs) * 2

    return twice


class Twice:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs) * 2


def smoothed(function):
    return functools.partial(function, label_smoothing=0.1)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    hidden = F.softmax(torch.relu(model(batch[0]).add(1)), -1).sigmoid()
    loss = F.cross_entropy(hidden, batch[1]) + F.max_pool1d(hidden[None], 2).norm()
    loss.backward()
    optimizer.step()
    return loss


REPLACED = [
    (F, "cross_entropy", wrapped),
    (F, "cross_entropy", Twice),
    (F, "cross_entropy", smoothed),
    (F, "max_pool1d", wrapped),
    (F, "linear", Twice),
    (torch, "relu", wrapped),
    (torch.Tensor, "add", wrapped),  # a method of C
    (torch.Tensor, "norm", wrapped),  # one of Python
    (torch.Tensor, "__getitem__", wrapped),
    (nn.Linear, "forward", wrapped),
]


@pytest.mark.parametrize(
    ("owner", "name", "replace"), REPLACED, ids=[f"{owner.__name__}.{n}-{r.__name__}" for owner, n, r in REPLACED]
)
def test_a_replaced_function_is_applied_once(owner, name, replace, monkeypatch):
    monkeypatch.setattr(owner, name, replace(getattr(owner, name)))
    made = [small.make(step, model=small.plain)() for _ in range(2) if torch.manual_seed(0)]
    traced, (_, model, optimizer, batch) = capture(*made[0]), made[1]
    for _ in range(2):
        assert torch.equal(traced.run(made[0][3]), step(model, optimizer, batch))
    assert all(map(torch.equal, made[0][1].parameters(), model.parameters()))


def test_a_kernel_that_is_replaced_inside_of_torch_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch._C._nn, "linear", wrapped(torch._C._nn.linear))
    with pytest.raises(CaptureError, match=r"the kernel linear was replaced inside of torch"):
        capture(*small.make(step, model=small.plain)())
