"""Preparing a step leaves nothing of it in the user's objects: no entry, no counter, no stand-in of a tensor."""

import collections
import functools
import importlib
import itertools
import logging
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812

from bench.workloads import zoo
from profiler.errors import CaptureError
from rewriter import checkpoint, checkpoint_model

LOG = []

# What a step changes of Python is lost in a planned one, and is told: here it is known.
pytestmark = pytest.mark.filterwarnings("ignore:the step changes Python objects")


class Net(nn.Module):
    """A small model that may keep what it sees, in whatever way `keep` does."""

    def __init__(self, keep=lambda model, hidden: None):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.keep = keep
        self.latest, self.count, self.seen, self.by_name = None, 0, [], {}

    def forward(self, x):
        hidden = self.first(x).relu()
        self.keep(self, hidden)
        return self.second(hidden)


def workload(keep=lambda loss: None, *, model=Net):
    torch.manual_seed(0)
    network = model()

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        keep(loss)
        return loss

    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    return step, network, optimizer, (torch.randn(32, 6), torch.randint(0, 4, (32,)))


def prepared(made, **options):
    return checkpoint(*made, budget="1GiB", strategy="mutwo", show_progress=False, **options)


# -- what a step keeps is taken away again ------------------------------------------------------------------------


class Keeper:
    """Everything in which a step might keep a tensor, a number or a count."""

    def __init__(self):
        self.entries, self.table, self.recent = [1], {"a": 1}, collections.deque([1], maxlen=3)
        self.marks, self.spread = {1}, collections.defaultdict(list)
        self.order = collections.OrderedDict(a=1, b=2)
        self.space = types.SimpleNamespace(best=None)
        self.generator = random.Random(1)
        self.numbers, self.tally = np.random.default_rng(2), collections.Counter()
        self.held = self.nested = None

    def contents(self):
        """All of it, in a form that can be compared."""
        found = {name: repr(value) for name, value in vars(self).items()}
        generators = self.generator.getstate(), repr(self.numbers.bit_generator.state)
        return found, generators, list(self.order), vars(self.space).copy()

    def keep(self, loss):
        detached = loss.detach()
        self.entries.append(detached)
        self.table["loss"] = detached
        self.recent.append(detached)
        self.marks.add("another")
        self.spread["losses"].append(detached)
        self.order.move_to_end("a")
        self.space.best = detached
        self.tally["steps"] += 1
        self.held = detached
        self.nested = [{"deep": (detached, [detached])}]
        self.added = [detached]


def test_whatever_holds_it_nothing_that_a_step_keeps_is_left_behind():
    keeper = Keeper()
    before = keeper.contents()
    step = prepared(workload(keeper.keep))
    assert step.verification.exact
    assert keeper.contents() == before


def test_globals_defaults_and_outer_variables_are_put_back():
    losses, count = [], 0

    def keep(loss, remembered=[]):  # noqa: B006 - the default that keeps things, as people write it
        nonlocal count
        count += 1
        LOG.append(loss.detach())
        losses.append(loss.item())
        remembered.append(loss.detach())
        keep.calls = getattr(keep, "calls", 0) + 1

    prepared(workload(keep))
    assert (losses, count, LOG, keep.__defaults__) == ([], 0, [], ([],))
    assert not hasattr(keep, "calls")


def keeps(model, hidden):
    model.latest = hidden
    model.count += 1
    model.seen.append(hidden.detach())
    model.by_name["hidden"] = hidden


def test_what_a_model_keeps_is_as_before_in_both_doors():
    made = workload(model=lambda: Net(keeps))
    model = made[1]
    prepared(made)
    assert (model.latest, model.count, model.seen, model.by_name) == (None, 0, [], {})
    checkpoint_model(model, budget="1GiB")
    with pytest.warns(UserWarning, match="its forward changes what a graph does not hold"):
        [made[0](*made[1:]) for _ in range(4)]  # by a way that keeps Python alive: trials leave nothing there
    assert model.count == len(model.seen) == 4
    assert not isinstance(model.latest, FakeTensor)
    assert not any(isinstance(one, FakeTensor) for one in model.seen)


def test_a_hooks_log_is_as_before():
    made, outputs, gradients = workload(), [], []
    made[1].first.register_forward_hook(lambda module, given, output: outputs.append(output))
    made[1].first.weight.register_hook(lambda gradient: gradients.append(gradient.norm()))
    prepared(made)
    assert outputs == gradients == []


def test_metrics_are_as_before():
    zoo.declare_torchvision_ops()
    torchmetrics = importlib.import_module("torchmetrics")
    metric = torchmetrics.MeanMetric()
    prepared(workload(lambda loss: metric.update(loss.detach())))
    assert metric.update_called is False
    assert not isinstance(metric.mean_value, FakeTensor)


# -- what cannot be taken away is an error that names the place ---------------------------------------------------


def test_a_stand_in_in_a_cache_is_refused_by_its_name():
    @functools.lru_cache(maxsize=4)
    def doubled(loss):
        return 2 * loss

    with pytest.raises(CaptureError, match=r"left a stand-in of a traced tensor in the cache of .*doubled"):
        prepared(workload(lambda loss: doubled(loss.detach())))


def test_a_stand_in_in_an_object_that_is_not_looked_into_is_refused_by_its_name():
    handler = logging.NullHandler()
    with pytest.raises(CaptureError, match=r"left a stand-in of a traced tensor in NullHandler\.last"):
        prepared(workload(lambda loss: setattr(handler, "last", loss.detach())))


def test_what_a_step_notes_on_a_logger_is_taken_away_again():
    logger = logging.getLogger("tests.nothing_is_left")
    prepared(workload(lambda loss: setattr(logger, "last", loss.detach())))
    assert not hasattr(logger, "last")


def test_an_iterator_that_cannot_be_set_back_is_refused_by_its_name():
    ticks = itertools.cycle([1.0, 2.0])
    positions = (i for i in range(100))
    with pytest.raises(CaptureError, match=r"draws from the outer variable positions.*cannot be put back"):
        prepared(workload(lambda loss: next(positions)))
    assert next(ticks) == 1.0


# -- optimizers that run as themselves ----------------------------------------------------------------------------


class Nested(torch.optim.Optimizer):
    """State in dicts of dicts, generators of its own, counters, a log; written to through `.data`."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.generator, self.calls, self.log = torch.Generator().manual_seed(3), 0, []
        self.chance, self.numbers, self.norms = random.Random(3), np.random.default_rng(3), np.zeros(2)

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.log.append(self.calls)
        self.norms[self.calls % 2] += self.chance.random() + self.numbers.random()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = {"left": torch.zeros(p.shape[0]), "history": []}
                state["factors"]["left"].data.add_(p.grad.reshape(p.shape[0], -1).sum(1))
                state["factors"]["history"].append(float(p.grad.sum()))
                p.data.add_(p.grad, alpha=-group["lr"])
                p.add_(torch.randn(p.shape, generator=self.generator), alpha=1e-3)


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside another optimizer, followed every second step."""

    def __init__(self, base):
        super().__init__(base.param_groups, dict(base.defaults))
        self.base, self.steps = base, 0
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        if self.steps % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


def accelerated(params):
    zoo.declare_torchvision_ops()
    accelerate = importlib.import_module("accelerate")
    return accelerate.Accelerator(cpu=True).prepare(torch.optim.Adam(params, lr=0.01))


OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "nested": Nested,
    "lookahead": lambda params: Lookahead(torch.optim.Adam(params, lr=0.01)),
    "accelerate": accelerated,
}


def frozen(value):
    """Everything in an optimizer, by identity and by value."""
    if isinstance(value, torch.Tensor):
        return id(value), value.tolist()
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().tolist()
    if isinstance(value, random.Random):
        return id(value), value.getstate()
    if isinstance(value, np.random.Generator):
        return id(value), value.bit_generator.state
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, dict):
        return {id(k) if isinstance(k, torch.Tensor) else k: frozen(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen(one) for one in value]
    if isinstance(value, torch.optim.Optimizer):
        return frozen(vars(value))
    return value if isinstance(value, (int, float, str)) else id(value)


@pytest.mark.parametrize("verify", [3, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_runs_as_itself_is_as_before_with_its_hooks(name, steps_before, verify):
    step, model, _, batch = workload()
    optimizer, average = OPTIMIZERS[name](model.parameters()), torch.zeros(6)
    stepped, ran = getattr(optimizer, "optimizer", optimizer), {"before": 0, "after": 0}

    def count(optimizer, args, kwargs):
        ran["before"] += 1

    def follow(optimizer, args, kwargs):
        ran["after"] += 1
        average.mul_(0.9).add_(model.first.weight.data[0], alpha=0.1)

    stepped.register_step_pre_hook(count)
    stepped.register_step_post_hook(follow)
    scheduler = torch.optim.lr_scheduler.StepLR(stepped, 2)  # which counts the steps on the optimizer
    for _ in range(steps_before):
        step(model, optimizer, batch)
        scheduler.step()

    def everything():
        params = [p.tolist() for p in model.parameters()]
        return frozen(optimizer), frozen(vars(scheduler)), frozen(average), dict(ran), params

    before = everything()
    planned = prepared((step, model, optimizer, batch), verify=verify)
    assert everything() == before
    assert planned.verification is None or planned.verification.exact


# -- tensors outside of model and optimizer -----------------------------------------------------------------------


def test_tensors_outside_are_written_to_by_calls_alone_also_through_data_and_views():
    average, total, teacher = torch.zeros(16, 6), torch.zeros(4), nn.BatchNorm1d(6)
    made = workload(lambda loss: None)
    inner, model, optimizer, batch = made

    def step(model, optimizer, batch):
        loss = inner(model, optimizer, batch)
        with torch.no_grad():
            average.data.mul_(0.99).add_(model.first.weight, alpha=0.01)
            total[1:2] += loss
            teacher(batch[0])
        return loss

    planned = prepared((step, model, optimizer, batch))
    assert not average.any()
    assert not total.any()
    assert int(teacher.num_batches_tracked) == 0
    assert not teacher.running_mean.any()
    planned(batch)
    assert average.any()
    assert total[1] != 0
    assert int(teacher.num_batches_tracked) == 1


def test_what_a_step_hangs_on_a_parameter_goes_again():
    made = workload()
    weight = made[1].first.weight
    weight.note = "mine"

    def step(model, optimizer, batch):
        loss = made[0](model, optimizer, batch)
        model.first.weight.latest = loss.detach()
        model.first.weight.note = "the step's"
        return loss

    prepared((step, *made[1:]))
    assert vars(weight) == {"note": "mine"}


def test_the_scale_of_a_gradient_scaler_is_the_one_that_the_planned_step_reads():
    made = workload()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def forward_backward(model, optimizer, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        return loss

    step = prepared((forward_backward, made[1], None, made[3]))
    scale = scaler._scale
    step(made[3])
    assert scaler._scale is scale
    assert float(scale) == 4.0
    assert step.verification.exact
