"""A step that changes Python objects: refused where the next step reads them, told where the change is lost."""

import collections
import itertools
import random
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from profiler.errors import CaptureError
from rewriter import checkpoint

BATCH = torch.randn(64, 8), torch.randint(0, 4, (64,))


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def planned(step, model=network, *, verify=False):
    torch.manual_seed(0)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return checkpoint(
        step, model, optimizer, BATCH, budget="100%", strategy="mutwo", show_progress=False, verify=verify
    )


def trained(model, optimizer, batch, *, scale=1.0):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]) * scale, batch[1])
    loss.backward()
    optimizer.step()
    return loss


# -- read by the next step ---------------------------------------------------------------------------------------------


class Accumulating:
    """The commonest accumulation: both traces see a micro-step."""

    def __init__(self):
        self.n = 0

    def __call__(self, model, optimizer, batch):
        self.n += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        if self.n % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class WarmingUp(nn.Module):
    """A counter of the model's own, which decides only after a while."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1.0 if self.calls < 1000 else 0.5)


def annealed():
    weights = {"beta": 1.0}

    def step(model, optimizer, batch):
        weights["beta"] *= 0.5
        return trained(model, optimizer, batch) if weights["beta"] > 0.1 else None

    return step


def counting_on_the_model(model, optimizer, batch):
    setattr(model, "calls", model.calls + 1)  # noqa: B010
    return trained(model, optimizer, batch, scale=1.0 if model.calls < 4 else 0.5)


def with_calls():
    """A model of a library's class, with an attribute that is the user's."""
    model = network()
    model.calls = 0
    return model


@pytest.mark.parametrize(
    ("make", "model", "named"),
    [
        (Accumulating, network, r"Accumulating\.n was 0 and is 1"),
        (lambda: trained, WarmingUp, r"module model\.calls was 0 and is 1"),
        (lambda: counting_on_the_model, with_calls, r"module model\.calls was 0 and is 1"),
        (annealed, network, r"weights\['beta'\] was 1\.0 and is 0\.5"),
    ],
    ids=["accumulation", "warm-up", "on a library's module", "annealing"],
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_counter_that_both_traces_agree_on_is_refused_by_name_with_both_ways_out(make, model, named, verify):
    with pytest.raises(CaptureError, match=f"{named}.*") as refusal:
        planned(make(), model, verify=verify)
    assert "pass what changes in the batch" in str(refusal.value)
    assert "checkpoint_model" in str(refusal.value)


class Recurrent(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.inner, self.state = network(), state

    def forward(self, x):
        out = self.inner(x)
        out = out if self.state is None else out + self.state
        self.state = out.detach()
        return out


class KeptLosses:
    def __init__(self):
        self.losses = []

    def __call__(self, model, optimizer, batch):
        loss = trained(model, optimizer, batch, scale=2.0 if sum(self.losses) > 100 else 1.0)
        self.losses.append(loss.item())
        return loss


class RecurrentPair(Recurrent):
    """A layer that keeps its state in a tuple, as recurrent ones give it."""

    def forward(self, x):
        out = self.inner(x)
        out = out if self.state is None else out + self.state[0]
        self.state = (out.detach(), None)
        return out


class Delayed:
    """A line of two, whose end is read: what a step puts in is read two steps later."""

    def __init__(self, line):
        self.line = line

    def __call__(self, model, optimizer, batch):
        optimizer.zero_grad()
        out = model(batch[0])
        loss = F.cross_entropy(out - self.line[0], batch[1])
        loss.backward()
        optimizer.step()
        if isinstance(self.line, list):
            self.line.pop(0)
        self.line.append(out.detach().mean(0))
        return loss


def two():
    return torch.zeros(4), torch.ones(4)


@pytest.mark.parametrize(
    ("step", "model", "named"),
    [
        (trained, lambda: Recurrent(torch.zeros(64, 4)), "module model.state"),
        (trained, lambda: Recurrent(None), "module model.state was None"),
        (trained, lambda: RecurrentPair(None), "module model.state was None"),
        (KeptLosses(), network, r"KeptLosses\.losses\[0\] was not set"),
        (Delayed([*two()]), network, "Delayed.line"),
        (Delayed(collections.deque(two(), maxlen=2)), network, "Delayed.line"),
    ],
    ids=["tensor", "none at first", "tuple", "list", "line of a list", "line of a deque"],
)
def test_what_a_step_computes_for_the_next_one_is_refused_by_name(step, model, named):
    with pytest.raises(CaptureError, match=f"keeps what it computes for the next step to read: {named}"):
        planned(step, model)


# -- written before it is read -----------------------------------------------------------------------------------------


class Balanced(nn.Module):
    """A layer that leaves a loss and a count for the step to read, as mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.inner, self.aux, self.parts = network(), None, {}

    def forward(self, x):
        out = self.inner(x)
        self.aux, self.count = out.pow(2).mean(), (x > 0).sum().item()
        self.parts["all"] = [out]
        return out


def balanced(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1]) + 0.1 * model.aux + model.parts["all"][0].mean()
    loss.backward()
    optimizer.step()
    return loss.detach() * model.count


class Hooked:
    """A hook that stores what a layer gives, in a list that each step begins by clearing."""

    def __init__(self):
        self.seen = []

    def __call__(self, model, optimizer, batch):
        self.seen.clear()
        handle = model[2].register_forward_hook(lambda layer, given, out: self.seen.append(out))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1]) + self.seen[0].pow(2).mean()
        handle.remove()
        loss.backward()
        optimizer.step()
        return loss


def normed():
    model = network()
    torch.nn.utils.weight_norm(model[2])
    return model


@pytest.mark.parametrize(
    ("step", "model"),
    [(balanced, Balanced), (Hooked(), network), (trained, normed)],
    ids=["attributes", "hook", "weight norm"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_each_step_writes_before_it_reads_it_is_no_state(step, model):
    step_of_plan = planned(step, model, verify=2)
    torch.manual_seed(0)
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(3):
        assert torch.equal(step_of_plan(BATCH), step(own, optimizer, BATCH))


class KeptOnTheClass(nn.Module):
    state = None

    def __init__(self, read):
        super().__init__()
        self.inner, self.read = network(), read

    def forward(self, x):
        out = self.inner(x)
        out = out if self.state is None else out * self.read(self.state)
        self.state = out.detach()
        return out


@pytest.mark.parametrize(
    "read", [lambda state: state.abs(), lambda state: 2, lambda state: len(state)], ids=["value", "presence", "length"]
)
def test_a_state_that_turns_up_in_the_first_step_is_refused_however_the_next_one_reads_it(read):
    with pytest.raises(CaptureError, match=r"keeps what it computes for the next step to read: module model\.state"):
        planned(trained, lambda: KeptOnTheClass(read))


def drawing(source, draw):
    return lambda model, optimizer, batch: trained(model, optimizer, batch, scale=1.0 + draw(source))


@pytest.mark.parametrize(
    "step",
    [
        drawing(random.Random(3), lambda source: source.random()),
        drawing(np.random.default_rng(3), lambda source: float(source.random())),
        drawing(itertools.count(), next),
        drawing((i for i in range(100)), next),
        drawing(iter([0.5] * 9), next),
    ],
    ids=["random", "numpy", "count", "generator", "iterator"],
)
def test_a_step_that_draws_from_an_object_is_refused_by_its_name(step):
    with pytest.raises(CaptureError, match=r"the step draws from the outer variable source.*checkpoint_model"):
        planned(step)


# -- lost --------------------------------------------------------------------------------------------------------------


class Logging:
    def __init__(self):
        self.n, self.log, self.stats, self.last = 0, [], {"losses": []}, None

    def __call__(self, model, optimizer, batch):
        self.n += 1
        loss = trained(model, optimizer, batch)
        self.log.append(0)
        self.stats["losses"].append(0.0)
        self.last = loss.detach()
        return loss


def test_a_step_that_only_writes_state_works_and_says_what_is_lost():
    with pytest.warns(UserWarning, match=r"does not do again.*Logging\.n; .*Logging\.log.*losses"):
        assert planned(Logging(), verify=True).verification.exact


def test_a_cache_that_holds_the_same_each_time_is_no_loss():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.ramp = network(), None

        def forward(self, x):
            if self.ramp is None:
                self.ramp = torch.arange(8.0)
            return self.inner(x * self.ramp)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned(trained, Cached, verify=True).verification.exact


def test_a_step_that_asks_for_the_time_is_told():
    def step(model, optimizer, batch):
        began = time.perf_counter()
        loss = trained(model, optimizer, batch)
        return loss if time.perf_counter() - began < 1e9 else None

    with pytest.warns(UserWarning, match=r"asks for the time or for chance \(in step\)"):
        planned(step)


def test_a_time_that_the_step_returns_is_refused():
    def step(model, optimizer, batch):
        return trained(model, optimizer, batch), time.perf_counter()

    with pytest.raises(CaptureError, match=r"value 2 of what it returns was .*, and the second time"):
        planned(step)
