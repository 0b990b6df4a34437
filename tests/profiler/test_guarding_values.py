"""Python values that a graph has baked in are noticed when they change, by name; the rest is not."""

import functools
import io
import logging
import queue
import random
import sqlite3
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.profiler.small import captured
from tests.side_by_side import assert_captured_equals_eager


class Gated(nn.Module):
    """Values of every kind that is guarded, one that the forward counts itself, and one by the class."""

    gain = 1.0

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.beta, self.layers, self.gate, self.kind, self.scales = 0.5, 1, True, "tanh", (1.0, 2.0)
        self._offset = None
        self.calls = 0
        self.history = []

    def forward(self, x):
        self.calls += 1
        for _ in range(self.layers):
            x = getattr(torch, self.kind)(self.inner(x))
        x = x * self.beta * self.scales[0] * self.gain if self.gate else x
        return self.head(x if self._offset is None else x + self._offset)


# -- values that modules hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("beta", 0.75, "module model.beta was 0.5 and is 0.75"),
        ("beta", 1, "module model.beta was 0.5 and is 1"),
        ("layers", 2, "module model.layers was 1 and is 2"),
        ("layers", True, "module model.layers was 1 and is True"),
        ("gate", False, "module model.gate was True and is False"),
        ("kind", "sigmoid", "module model.kind was 'tanh' and is 'sigmoid'"),
        ("scales", (3.0, 2.0), "module model.scales was (1.0, 2.0) and is (3.0, 2.0)"),
        ("_offset", 1.0, "module model._offset was None and is 1.0"),
        ("gain", 2.0, "module model.gain was not set and is 2.0"),
    ],
)
def test_a_changed_value_of_a_module_is_noticed_and_honoured(name, value, said):
    def change(i, model, optimizer):
        if i == 0:
            setattr(model, name, value)

    traced, model, _, batch = captured(model=Gated)
    setattr(model, name, value)
    assert traced.convention.check(batch) == [said]
    assert_captured_equals_eager(small.make(model=Gated), between=change, recaptures=1)


def test_torchs_own_layers_are_guarded_by_their_paths():
    traced, model, _, batch = captured()
    model[3].p = 0.5
    model[1].momentum = None
    assert traced.convention.check(batch) == [
        "module 1.momentum was 0.1 and is None",
        "module 3.p was 0.2 and is 0.5",
    ]


def test_a_value_that_is_taken_away_is_noticed():
    traced, model, _, batch = captured(model=Gated)
    del model.beta
    assert traced.convention.check(batch) == ["module model.beta was 0.5 and is not set"]


def test_a_value_of_the_class_is_noticed(monkeypatch):
    traced, _, _, batch = captured(model=Gated)
    monkeypatch.setattr(Gated, "gain", 3.0)
    assert traced.convention.check(batch) == ["class Gated.gain was 1.0 and is 3.0"]


def test_values_that_the_step_changes_itself_and_values_put_back_are_not_minded():
    traced, model, _, batch = captured(model=Gated)
    model.calls += 7
    model.history.append(3)
    model.note = "a new one, which no forward can have read"
    model.beta = 0.25
    model.beta = 1.0 / 2
    assert traced.convention.check(batch) == []


# -- values that the step reads from outside --------------------------------------------------------------------------

RATIO = 0.5
step_count = 0  # as many a script has it
step = 0  # the name of an attribute that the step reads, too


def reads_a_global(model, optimizer, batch):
    optimizer.zero_grad()
    loss = (lambda: RATIO)() * F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def counts_in_a_global(model, optimizer, batch):
    global step_count
    step_count += 1
    return small.step(model, optimizer, batch)


def test_a_changed_global_is_noticed_and_honoured(monkeypatch):
    def change(i, model, optimizer):
        monkeypatch.setitem(globals(), "RATIO", 0.5 if i % 2 else 0.75)

    traced, _, _, batch = captured(reads_a_global)
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == ["the global RATIO was 0.5 and is 0.25"]
    monkeypatch.setitem(globals(), "RATIO", 0.5)
    assert_captured_equals_eager(small.make(reads_a_global), steps=2, between=change, recaptures=1)


def test_a_global_of_an_attributes_name_and_one_that_the_step_counts_are_not_minded(monkeypatch):
    for function in (reads_a_global, counts_in_a_global):
        traced, _, _, batch = captured(function)
        monkeypatch.setitem(globals(), "step", step + 1)
        monkeypatch.setitem(globals(), "step_count", step_count + 1)
        assert traced.convention.check(batch) == []


def test_a_changed_variable_of_the_surrounding_function_is_noticed_and_one_that_the_step_counts_is_not():
    ratio, calls = 0.5, 0

    def step(model, optimizer, batch):
        nonlocal calls
        calls += 1
        return ratio * small.step(model, optimizer, batch)

    def forget():
        nonlocal ratio
        del ratio

    traced, _, _, batch = captured(step)
    calls += 1
    assert traced.convention.check(batch) == []
    ratio = 0.75
    assert traced.convention.check(batch) == ["the outer variable ratio was 0.5 and is 0.75"]
    forget()
    assert traced.convention.check(batch) == ["the outer variable ratio was 0.5 and is not set"]


def scaled_step(model, optimizer, batch, *, ratio):
    return ratio * small.step(model, optimizer, batch)


def test_a_changed_argument_of_a_partial_is_noticed_and_so_is_what_its_function_reads(monkeypatch):
    def around(model, optimizer, batch, *, ratio):
        return RATIO * scaled_step(model, optimizer, batch, ratio=ratio)

    step = functools.partial(around, ratio=0.5)
    traced, _, _, batch = captured(step)
    step.keywords["ratio"] = 0.75
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == [
        "the step's argument ratio was 0.5 and is 0.75",
        "the global RATIO was 0.5 and is 0.25",
    ]


def test_what_a_decorated_step_reads_is_noticed(monkeypatch):
    def logged(function):
        @functools.wraps(function)
        def call(*args):
            return function(*args)

        return call

    traced, _, _, batch = captured(logged(reads_a_global))
    monkeypatch.setitem(globals(), "RATIO", 0.25)
    assert traced.convention.check(batch) == ["the global RATIO was 0.5 and is 0.25"]


class Trainer:
    """A step as a method, and as what the object itself does."""

    def __init__(self):
        self.ratio, self.steps, self.epoch = 0.5, 0, 0

    def step(self, model, optimizer, batch):
        self.steps += 1
        return self.ratio * small.step(model, optimizer, batch)

    def __call__(self, model, optimizer, batch):
        return self.ratio * small.step(model, optimizer, batch)


@pytest.mark.parametrize("step_of", [lambda trainer: trainer.step, lambda trainer: trainer], ids=["method", "object"])
def test_what_a_method_reads_of_its_object_is_noticed_and_the_rest_of_the_object_is_not(step_of):
    trainer = Trainer()
    traced, _, _, batch = captured(step_of(trainer))
    trainer.epoch, trainer.steps = 1, 5
    assert traced.convention.check(batch) == []
    trainer.ratio = 0.75
    assert traced.convention.check(batch) == ["Trainer.ratio was 0.5 and is 0.75"]


# -- what the step itself changes -------------------------------------------------------------------------------------


class Counting:
    """A step that counts, logs, keeps and draws."""

    def __init__(self):
        self.counted, self.read, self.log, self.last = 0, 0, [], None
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)

    def __call__(self, model, optimizer, batch):
        self.counted += 1
        self.read += 1
        loss = small.step(model, optimizer, batch) * (1 if self.read % 2 else 2)
        self.log.append("loss")
        self.last = "a text"
        return loss * self.random.random() * self.numpy.random()


def test_what_the_step_changes_is_reported_with_whether_it_is_read():
    step = Counting()
    traced, *_ = captured(step)
    changes = {change.path: change for change in traced.convention.guards.changes}
    assert not changes["Counting.counted"].read
    assert changes["Counting.read"].read
    assert str(changes["Counting.read"]) == "Counting.read was 0 and is 1"
    assert not changes["the number of entries of Counting.log"].read
    assert changes["the state of Counting.random"].read
    assert changes["the state of Counting.numpy"].read
    assert not changes["Counting.last"].read


def test_what_the_step_changes_itself_is_no_reason_to_capture_again():
    step = Counting()
    traced, *_, batch = captured(step)
    step.counted, step.read, step.last = 5, 7, "another"
    step.log.append("more")
    step.random.random()
    step.numpy.random()
    assert traced.convention.check(batch) == []


# -- bounds and cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [list(range(20_000)), dict.fromkeys(range(20_000)), np.zeros(1 << 18)], ids=type)
def test_a_container_that_is_too_large_to_be_watched_is_said_by_name(huge):
    def step(model, optimizer, batch):
        return small.step(model, optimizer, batch) * (1 + huge[7] if isinstance(huge, list) else len(huge))

    with pytest.warns(UserWarning, match=r"the outer variable huge has \d+ entries, more than are watched"):
        captured(step)


def test_a_large_container_that_is_only_written_is_not_mentioned():
    log = list(range(20_000))

    def step(model, optimizer, batch):
        log.append(0)
        return small.step(model, optimizer, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(step)


def test_values_that_are_put_there_anew_and_are_equal_hold_again_and_again():
    traced, model, _, batch = captured(model=Gated)
    for i in range(3):
        model.beta, model.scales = float(f"0.{5 + 0 * i}"), tuple(float(f"{n}.0") for n in (1, 2))
        assert traced.convention.check(batch) == []


def test_what_torch_wraps_when_something_is_compiled_for_the_first_time_is_no_change(monkeypatch):
    wrapped = torch.optim.SGD._init_group  # or not yet, where nothing was compiled in this process
    original = getattr(wrapped, "_torchdynamo_orig_callable", wrapped)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", original)
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    monkeypatch.setattr(torch.optim.SGD, "_init_group", torch._dynamo.disable(original))
    assert traced.convention.check(batch) == []
    monkeypatch.setattr(torch.optim.SGD, "_init_group", lambda *_: False)
    assert "SGD._init_group" in traced.convention.check(batch)[0]


# -- what is set on parameters ----------------------------------------------------------------------------------------


def marked():
    model = small.mlp()
    for i, p in enumerate(model.parameters()):
        p.lr_mult, p.frozen, p.mask = 0.5 + i, i == 1, torch.ones_like(p) * i
    return model


def scaled_by_marks(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    for p in model.parameters():
        if getattr(p, "frozen", False):
            p.grad.zero_()
        p.grad.mul_(p.lr_mult).mul_(p.mask)
    optimizer.step()
    return loss.detach()


def test_what_is_set_on_parameters_counts_as_in_eager():
    assert_captured_equals_eager(small.make(scaled_by_marks, model=marked))


def test_what_the_step_sets_on_parameters_is_reported_and_the_parameters_are_left_as_they_were():
    def step(model, optimizer, batch):
        for p in model.parameters():
            p.seen = getattr(p, "seen", 0) + 1
        return small.step(model, optimizer, batch)

    traced, model, *_ = captured(step)
    assert [vars(p) for p in model.parameters()] == [{}] * len(list(model.parameters()))
    assert any("seen" in change.path for change in traced.convention.guards.changes)


@pytest.mark.parametrize("make", [lambda: io.StringIO("1.0"), lambda: sqlite3.connect(":memory:")])
def test_an_object_that_others_fill_and_nobody_can_look_into_is_said_by_name(make):
    asked = make()

    def step(model, optimizer, batch):
        asked.__class__  # noqa: B018 - whatever is read of it
        return small.step(model, optimizer, batch)

    with pytest.warns(UserWarning, match=r"the outer variable asked is a .*will not notice when it changes"):
        captured(step)


def test_loggers_locks_and_queues_are_not_mentioned():
    logger, lock, waiting = logging.getLogger("quiet"), threading.Lock(), queue.Queue()

    def step(model, optimizer, batch):
        with lock:
            logger.debug("%d waiting", waiting.qsize())
        return small.step(model, optimizer, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(step)


def test_what_is_set_on_a_tensor_of_the_batch_counts_where_the_step_reads_it():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1]) * getattr(batch[0], "weight_of_it", 1.0)
        loss.backward()
        optimizer.step()
        return loss.detach()

    traced, model, optimizer, (x, y) = captured(step)
    x.note = "a"
    assert traced.convention.check((x, y)) == []
    x.weight_of_it = 0.5
    assert traced.convention.check((x, y)) == ["batch leaf 0.weight_of_it was not set and is 0.5"]
    again = capture(step, model, optimizer, (x, y))
    assert again.convention.check((x, y)) == []
    x.weight_of_it = 0.25
    assert again.convention.check((x, y)) == ["batch leaf 0.weight_of_it was 0.5 and is 0.25"]
