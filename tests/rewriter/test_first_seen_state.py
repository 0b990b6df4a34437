"""State that a step makes at its first call, wherever it lies: refused by name where the next call reads it."""

import collections
import contextvars
import dataclasses
import enum
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from profiler.errors import CaptureError
from rewriter import checkpoint

BATCH = torch.randn(4, 3)


class OnClass: ...


class Kind(enum.Enum):
    ONE = 1


class Slotted:
    __slots__ = ("state",)


class Backed:
    @property
    def state(self):
        return self.__dict__.get("_state")

    @state.setter
    def state(self, value):
        self.__dict__["_state"] = value


@dataclasses.dataclass(frozen=True)
class Frozen:
    state: Any = None


def helper(): ...


def attribute_of(holder):
    return (lambda: getattr(holder, "state", None)), (lambda value: setattr(holder, "state", value))


def variable():
    def get():
        return globals().get("FIRST_SEEN")

    def put(value):
        global FIRST_SEEN
        FIRST_SEEN = value

    return get, put


def replaced_object():
    box = [Frozen()]
    return (lambda: box[0].state), (lambda value: box.__setitem__(0, dataclasses.replace(box[0], state=value)))


def weak_values():
    found, alive = weakref.WeakValueDictionary(), []

    def put(value):
        alive.append(OnClass())
        alive[-1].state = value
        found["one"] = alive[-1]

    return (lambda: getattr(found.get("one"), "state", None)), put


def context():
    held = contextvars.ContextVar("first_seen")
    return (lambda: held.get(None)), held.set


def entries(made):
    return (lambda: made.get("state")), (lambda value: made.__setitem__("state", value))


PLACES = {
    "class": lambda: attribute_of(type("Fresh", (), {})),
    "base class": lambda: attribute_of(type("Fresh", (OnClass,), {})),
    "enum": lambda: attribute_of(Kind.ONE),
    "slots": lambda: attribute_of(Slotted()),
    "property": lambda: attribute_of(Backed()),
    "function": lambda: attribute_of(helper),
    "thread local": lambda: attribute_of(threading.local()),
    "tensor": lambda: attribute_of(torch.zeros(1)),
    "global": variable,
    "user dict": lambda: entries(collections.UserDict()),
    "chain map": lambda: entries(collections.ChainMap({}, {})),
    "replaced object": replaced_object,
    "weak values": weak_values,
    "context variable": context,
}


def planned(loss_of, model=None):
    torch.manual_seed(0)
    model = model or nn.Linear(3, 2)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkpoint(step, model, optimizer, BATCH, budget="1GiB", strategy="mutwo", show_progress=False, verify=False)


@pytest.mark.parametrize("place", PLACES)
def test_what_the_next_call_reads_is_refused_wherever_it_first_appears(place):
    get, put = PLACES[place]()

    def loss_of(model, batch):
        loss, before = model(batch).square().mean(), get()
        put(loss.detach())
        return loss if before is None else loss + (loss - before).square()

    with pytest.raises(CaptureError, match="keeps what it computes for the next step to read"):
        planned(loss_of)
    assert get() is None


def test_a_length_that_grows_and_decides_later_is_refused():
    log = []

    def loss_of(model, batch):
        log.append(0)
        return model(batch).square().mean() * (2.0 if len(log) > 3 else 1.0)

    with pytest.raises(CaptureError, match="the number of entries of the outer variable log"):
        planned(loss_of)


class Lazy(nn.Module):
    """Makes a tensor of constants at its first call."""

    def __init__(self, later):
        super().__init__()
        self.inner, self.made, self.later = nn.Linear(3, 2), None, later

    def forward(self, x):
        self.made = torch.ones(1) if self.made is None else self.later(self.made)
        return self.inner(x) * self.made


@pytest.mark.parametrize("later", [lambda made: made + 1, lambda made: made.add_(1)], ids=["anew", "in place"])
def test_a_tensor_of_constants_that_each_call_changes_is_refused(later):
    with pytest.raises(CaptureError, match=r"makes something at its first call and changes it.*made was None"):
        planned(lambda model, batch: model(batch).square().mean(), Lazy(later))


def test_a_tensor_of_constants_that_stays_as_it_was_made_is_planned_and_another_in_its_place_is_read():
    step = planned(lambda model, batch: model(batch).square().mean(), model := Lazy(lambda made: made))
    assert step.prove(BATCH, steps=2).exact
    before = step(BATCH)
    model.made = torch.zeros(1)
    with pytest.warns(UserWarning, match=r"planned anew, because .*made was None and is a tensor"):
        assert step(BATCH) == 0 < before


def test_a_tensor_of_constants_that_each_call_makes_anew_is_no_reason_to_plan_again():
    step = planned(lambda model, batch: model(batch).square().mean(), model := Lazy(lambda made: torch.ones(1)))
    for _ in range(2):
        step(BATCH)  # planning anew would warn
        model(BATCH)  # as an evaluation does


def test_a_model_in_another_precision_is_captured_anew_and_its_gradients_are_no_views():
    step = planned(lambda model, batch: model(batch).square().mean(), model := nn.Linear(3, 2))
    step(BATCH)
    assert not model.weight.grad._is_view()
    model.double()
    with pytest.warns(UserWarning, match="captured and planned anew"):
        assert step(BATCH.double()).dtype == torch.float64


def test_a_hook_on_all_modules_is_in_the_graph_and_not_around_it():
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, returned: returned * 2)
    try:
        step = planned(lambda model, batch: model(batch).square().mean())
        assert step.prove(BATCH).exact
    finally:
        handle.remove()


def test_a_view_from_outside_is_read_as_any_other_tensor():
    view = torch.ones(6)[1:4]
    step = planned(lambda model, batch: model(batch * view).square().mean())
    assert step.prove(BATCH).exact
