"""State in odd places: a change is noticed before the step runs; what cannot be watched is said when it is captured."""

import array
import collections
import importlib
import itertools
import operator
import os
import sys
import threading
import types
import uuid
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.tracing.whole_step import capture
from tests.profiler import small

FACTOR = 1.0


def captured(factor, model=None):
    """A step that multiplies by what `factor()` gives."""
    model = nn.Linear(4, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean() * factor()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(5, 4)
    return capture(step, model, optimizer, batch), batch


def namespace(**values):
    return types.SimpleNamespace(**values)


def environment():
    os.environ["FACTOR_OF_A_TEST"] = "1"
    return (lambda: float(os.environ["FACTOR_OF_A_TEST"])), lambda: os.environ.update(FACTOR_OF_A_TEST="2")


def environment_by_function():
    os.environ["FACTOR_OF_A_TEST"] = "1"
    return (lambda: float(os.getenv("FACTOR_OF_A_TEST", "1"))), lambda: os.environ.update(FACTOR_OF_A_TEST="2")


def globals_by_name():
    return (lambda: globals()["FACTOR"]), lambda: globals().update(FACTOR=globals()["FACTOR"] + 1)


def local_to_a_thread():
    held = threading.local()
    held.factor = 1.0
    return (lambda: held.factor), lambda: setattr(held, "factor", 2.0)


def chained():
    base = {"factor": 1.0}
    held = collections.ChainMap({}, base)
    return (lambda: held["factor"]), lambda: base.update(factor=2.0)


def raw(held):
    def change():
        held[0] = 2

    return lambda: (lambda: float(held[0]), change)


def viewed():
    held = bytearray([1])
    view = memoryview(held)
    return (lambda: float(view[0])), lambda: held.__setitem__(0, 2)


def gotten():
    held, get = namespace(factor=1.0), operator.attrgetter("factor")
    return (lambda: get(held)), lambda: setattr(held, "factor", 2.0)


def weakly_held():
    setting = Setting()
    held = weakref.WeakValueDictionary(setting=setting)
    return (lambda: held["setting"].factor), lambda: setattr(setting, "factor", 2.0)


class Setting:
    factor = 1.0


def by_proxy():
    setting = Setting()
    proxy = weakref.proxy(setting)
    return (lambda: proxy.factor), lambda: setattr(setting, "factor", 2.0)


def unset_slot():
    class Slotted:
        __slots__ = ("factor",)

    held = Slotted()
    return (lambda: getattr(held, "factor", 1.0)), lambda: setattr(held, "factor", 2.0)


def module_of_a_name(look_up):
    def make():
        module = sys.modules["config_of_a_test"] = types.ModuleType("config_of_a_test")
        module.factor = 1.0
        return (lambda: look_up().factor), lambda: setattr(module, "factor", 2.0)

    return make


def switch(read, write):
    return lambda: ((lambda: 2.0 if read() else 1.0), lambda: write(not read()))


@pytest.mark.filterwarnings("ignore:.*by a weak reference alone")
@pytest.mark.parametrize(
    "make",
    [
        environment,
        environment_by_function,
        globals_by_name,
        local_to_a_thread,
        chained,
        raw(bytearray([1])),
        raw(array.array("d", [1.0])),
        viewed,
        gotten,
        weakly_held,
        by_proxy,
        unset_slot,
        module_of_a_name(lambda: sys.modules["config_of_a_test"]),
        module_of_a_name(lambda: importlib.import_module("config_of_a_test")),
    ],
)
def test_a_value_in_an_odd_place_is_noticed_when_it_changes(make):
    factor, change = make()
    traced, batch = captured(factor)
    assert traced.convention.check(batch) == []
    change()
    assert traced.convention.check(batch) != []


@pytest.mark.parametrize("weak", [weakref.ref, weakref.proxy, lambda one: weakref.WeakSet([one])])
def test_what_a_weak_reference_alone_leads_to_is_told_since_it_is_kept_alive(weak):
    alive = [Setting()]
    held = weak(alive[0])
    with pytest.warns(UserWarning, match="a Setting, by a weak reference alone: the planned step keeps it alive"):
        captured(lambda: 1.0 if held else 2.0)
    keeper = captured(lambda: (1.0 if held else 2.0) * len(alive))  # whose list would be noticed to be another
    alive.clear()
    assert keeper[0].convention.check(keeper[1]) != []


def test_annotations_that_are_read_are_told():
    def noted(x: 1.0): ...

    with pytest.warns(UserWarning, match="reads annotations of functions or classes, which are not looked into"):
        captured(lambda: noted.__annotations__["x"])


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.backends.cudnn, "allow_tf32"),
        (torch.utils.deterministic, "fill_uninitialized_memory"),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    ],
)
def test_a_switch_of_torchs_is_noticed(owner, name):
    traced, batch = captured(lambda: 1.0)
    before = getattr(owner, name)
    try:
        setattr(owner, name, not before)
        assert traced.convention.check(batch) != []
    finally:
        setattr(owner, name, before)
    assert traced.convention.check(batch) == []


def test_the_detection_of_anomalies_is_noticed():
    traced, batch = captured(lambda: 1.0)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        assert traced.convention.check(batch) == ["the detection of anomalies was off and is on"]


def test_a_forward_that_a_class_gets_of_its_own_later_is_noticed():
    class Inherited(nn.Linear):
        pass

    class AlsoInherited(Inherited):
        pass

    traced, batch = captured(lambda: 1.0, AlsoInherited(4, 3))
    Inherited.forward = lambda self, x: nn.Linear.forward(self, x) * 2
    assert any("forward" in said for said in traced.convention.check(batch))


PAIRS, COUNTED = zip(range(1, 99), range(99), strict=False), itertools.cycle([1.0])


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (lambda: next(PAIRS)[0], "can draw from the global PAIRS"),
        (lambda: next(COUNTED), "can draw from the global COUNTED"),
        (lambda: 1.0 + uuid.uuid4().int % 7, "asks for the time or for chance"),
        (lambda: 1.0 + os.urandom(1)[0], "asks for the time or for chance"),
    ],
)
def test_what_is_another_at_each_step_and_cannot_be_watched_is_said(factor, said):
    traced, _ = captured(factor)
    assert any(one.startswith(said) for one in traced.convention.guards.once)


def test_a_file_that_the_step_reads_is_said(tmp_path):
    file = tmp_path / "factor"
    file.write_text("2")
    traced, _ = captured(lambda: float(file.read_text()))
    assert traced.convention.guards.once == (f"reads {file}",)


def test_an_ordinary_step_does_nothing_that_is_another_each_time():
    traced = capture(small.step, model := small.mlp(), small.sgd(model), small.data())
    assert traced.convention.guards.once == ()
    assert traced.convention.guards.changes == ()


def test_a_class_whose_module_is_no_text_is_followed_like_any_other():
    class Odd:
        weight = 0.5

    Odd.__module__ = property(lambda self: "odd")  # as pandas' and some C classes have it
    odd = Odd()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = odd.weight * F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    traced = capture(*small.make(step)())
    assert traced.graph.ops
