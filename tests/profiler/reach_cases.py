"""Cases of a step that reads something, and of a change that it must notice."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from profiler.tracing.whole_step import capture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step, a change of what it reads with what is said of it, and a change that is none of its business."""

    loss: Callable[[Any, Any], Any] | None = None
    step: Any = None
    change: Callable[[], Any]
    said: str
    unrelated: Callable[[], Any] = lambda: None
    model: nn.Module | None = None


@dataclasses.dataclass
class Config:
    alpha: float = 0.5
    epoch: int = 0
    inner: Any = None


def linear():
    return nn.Linear(3, 2)


def step_of(loss_of):
    """The ordinary step with that loss."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def squared(model, batch):
    return model(batch).square().mean()


def setting(holder, **values):
    """A change of attributes."""

    def change():
        for name, value in values.items():
            setattr(holder, name, value)

    return change


def putting(container, key, value):
    """A change of an entry."""
    return lambda: container.__setitem__(key, value)


@contextmanager
def as_before(*holders: Any) -> Iterator[None]:
    """Attributes of modules and classes that a case has changed, added or taken away, are put back at the end."""
    kept = [(holder, dict(vars(holder))) for holder in holders]
    yield
    for holder, before in kept:
        for name in [name for name in vars(holder) if name not in before]:
            delattr(holder, name)
        for name, value in before.items():
            if vars(holder)[name] is not value:
                setattr(holder, name, value)


def assert_noticed(make):
    """A change of what the step of a case reads is noticed by name, and another is not."""
    torch.manual_seed(0)
    case = make()
    model = linear() if case.model is None else case.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, batch = case.step or step_of(case.loss), torch.randn(4, 3)
    traced = capture(step, model, optimizer, batch)
    check = traced.convention.check
    assert check(batch) == []
    case.unrelated()
    assert check(batch) == []
    case.change()
    said = check(batch)
    assert [sentence for sentence in said if re.search(case.said, sentence)], said
    again = capture(step, model, optimizer, batch)
    assert again.convention.check(batch) == []
