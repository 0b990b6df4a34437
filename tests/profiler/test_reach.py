"""Whatever a step reads, however it reads it: a change is noticed by name, and what it does not read is not."""

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from profiler.tracing.whole_step import capture
from tests.profiler import helpers_of_steps as other_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step, a change of what it reads with what is said of it, and a change that is none of its business."""

    loss: Callable[[Any, Any], Any] | None = None
    step: Any = None
    change: Callable[[], Any]
    said: str
    unrelated: Callable[[], Any] = lambda: None
    model: nn.Module | None = None


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


# -- containers ---------------------------------------------------------------------------------------------------


def entry_of_a_list():
    weights = [0.5, 2.0]
    return Case(
        loss=lambda m, b: squared(m, b) * weights[0],
        change=putting(weights, 0, 0.75),
        said=r"the outer variable weights of <lambda>\[0\] was 0\.5 and is 0\.75",
    )


def length_of_a_list():
    weights = [0.5]
    return Case(
        loss=lambda m, b: sum(squared(m, b) * w for w in weights),
        change=lambda: weights.append(2.0),
        said=r"weights of <lambda> had 1 entries and has 2",
    )


def entry_of_a_dict_by_its_key():
    cfg = {"alpha": 0.5, "epoch": 0}
    return Case(
        loss=lambda m, b: squared(m, b) * cfg["alpha"],
        change=putting(cfg, "alpha", 0.75),
        said=r"cfg of <lambda>\['alpha'\] was 0\.5 and is 0\.75",
        unrelated=putting(cfg, "epoch", 1),
    )


def missing_key_of_a_dict():
    cfg = {"epoch": 0}
    return Case(
        loss=lambda m, b: squared(m, b) * cfg.get("alpha", 0.5),
        change=putting(cfg, "alpha", 0.75),
        said=r"cfg of <lambda>\['alpha'\] was not set and is 0\.75",
        unrelated=putting(cfg, "epoch", 1),
    )


def dict_that_is_gone_through():
    weights = {"a": 0.5, "b": 2.0}
    return Case(
        loss=lambda m, b: sum(squared(m, b) * w for w in weights.values()),
        change=putting(weights, "c", 1.0),
        said=r"weights of <lambda>\['c'\] was not set and is 1\.0",
    )


def order_of_a_dict():
    weights = {"a": 0.5, "b": 2.0}
    return Case(
        loss=lambda m, b: sum(squared(m, b) * w for w in weights.values()),
        change=lambda: weights.__setitem__("a", weights.pop("a")),
        said=r"the entries of the outer variable weights of <lambda> are in another order",
    )


def nested_containers():
    cfg = {"loss": [{"weights": (0.5, [2.0])}]}
    return Case(
        loss=lambda m, b: squared(m, b) * cfg["loss"][0]["weights"][1][0],
        change=lambda: cfg["loss"][0]["weights"][1].__setitem__(0, 3.0),
        said=r"cfg of <lambda>\['loss'\]\[0\]\['weights'\]\[1\]\[0\] was 2\.0 and is 3\.0",
    )


def element_of_a_set():
    chosen = {1, 2}
    return Case(
        loss=lambda m, b: squared(m, b) * (2 if 3 in chosen else 1),
        change=lambda: chosen.add(3),
        said=r"the element 3 of the outer variable chosen of <lambda> was not set and is 3",
    )


def entry_of_a_deque():
    recent = collections.deque([0.5, 1.0], maxlen=2)
    return Case(
        loss=lambda m, b: squared(m, b) * recent[0],
        change=lambda: recent.append(2.0),
        said=r"recent of <lambda>\[0\] was 0\.5 and is 1\.0",
    )


def list_put_in_place_of_another():
    holder = types.SimpleNamespace(weights=[0.5])
    return Case(
        loss=lambda m, b: squared(m, b) * holder.weights[0],
        change=setting(holder, weights=[0.75]),
        said=r"holder of <lambda>\.weights was \[0\.5\] and is \[0\.75\]",
        unrelated=setting(holder, weights=[1.0 / 2]),
    )


# -- objects ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    alpha: float = 0.5
    epoch: int = 0
    inner: Any = None


class Slotted:
    __slots__ = ("alpha", "epoch")

    def __init__(self):
        self.alpha, self.epoch = 0.5, 0


class Backed:
    def __init__(self):
        self._alpha, self._epoch = 0.5, 0

    @property
    def alpha(self):
        return self._alpha


class Open:
    """Attributes looked up in a dict of its own, as configuration libraries do."""

    def __init__(self, **values):
        self.__dict__["_content"] = values

    def __getattr__(self, name):
        return self.__dict__["_content"][name]

    def __setattr__(self, name, value):
        self.__dict__["_content"][name] = value


class Mapped(dict):
    """A dict whose entries are attributes, too."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Callee:
    gain = 0.5
    level = 1

    def __call__(self, loss):
        return loss * self.gain


class Point(NamedTuple):
    alpha: Any
    epoch: int


def reading_alpha(holder, unrelated=True):
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=setting(holder, alpha=0.75),
        said=r"the outer variable holder of <lambda>\S* was 0\.5 and is 0\.75",
        unrelated=setting(holder, epoch=1) if unrelated else lambda: None,
    )


def dataclass():
    return reading_alpha(Config())


def simple_namespace():
    return reading_alpha(types.SimpleNamespace(alpha=0.5, epoch=0))


def argparse_namespace():
    return reading_alpha(argparse.Namespace(alpha=0.5, epoch=0))


def slots():
    return reading_alpha(Slotted())


def object_with_a_lookup_of_its_own():
    return reading_alpha(Open(alpha=0.5, epoch=0), unrelated=False)


def dict_with_attributes():
    return reading_alpha(Mapped(alpha=0.5), unrelated=False)


def inner_object():
    holder = Config(inner=Config())
    return Case(
        loss=lambda m, b: squared(m, b) * holder.inner.alpha,
        change=setting(holder.inner, alpha=0.75),
        said=r"holder of <lambda>\.inner\.alpha was 0\.5 and is 0\.75",
        unrelated=setting(holder.inner, epoch=3),
    )


def object_put_in_place_of_another():
    holder = Config(inner=Config())
    return Case(
        loss=lambda m, b: squared(m, b) * holder.inner.alpha,
        change=setting(holder, inner=Config(alpha=0.75)),
        said=r"holder of <lambda>\.inner was Config\(alpha=0\.5, .* and is Config\(alpha=0\.75",
        unrelated=setting(holder, inner=Config(epoch=9)),
    )


def named_tuple_that_holds_a_list():
    point = Point(alpha=[0.5], epoch=0)
    return Case(
        loss=lambda m, b: squared(m, b) * point.alpha[0],
        change=putting(point.alpha, 0, 0.75),
        said=r"point of <lambda>\[0\]\[0\] was 0\.5 and is 0\.75",
    )


def backing_field_of_a_property():
    holder = Backed()
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=setting(holder, _alpha=0.75),
        said=r"holder of <lambda>\._alpha was 0\.5 and is 0\.75",
        unrelated=setting(holder, _epoch=1),
    )


def attribute_that_was_missing():
    holder = types.SimpleNamespace(epoch=0)
    return Case(
        loss=lambda m, b: squared(m, b) * getattr(holder, "alpha", 0.5),
        change=setting(holder, alpha=0.75),
        said=r"holder of <lambda>\.alpha was not set and is 0\.75",
        unrelated=setting(holder, note=1),
    )


def attribute_by_a_computed_name():
    holder, names = Config(), ["alpha"]
    return Case(
        loss=lambda m, b: squared(m, b) * getattr(holder, names[0]),
        change=setting(holder, alpha=0.75),
        said=r"holder of <lambda>\.alpha was 0\.5 and is 0\.75",
    )


def attribute_by_vars():
    holder = Config()
    return Case(
        loss=lambda m, b: squared(m, b) * vars(holder)["alpha"],
        change=setting(holder, alpha=0.75),
        said=r"holder of <lambda>\.alpha was 0\.5 and is 0\.75",
    )


def attribute_by_asdict():
    holder = Config()
    return Case(
        loss=lambda m, b: squared(m, b) * dataclasses.asdict(holder)["alpha"],
        change=setting(holder, alpha=0.75),
        said=r"holder of <lambda>\.alpha was 0\.5 and is 0\.75",
    )


def value_of_a_class():
    class Local(Callee):
        gain = 0.5

    callee = Local()
    return Case(
        loss=lambda m, b: callee(squared(m, b)),
        change=setting(Local, gain=0.75),
        said=r"class Local\.gain was 0\.5 and is 0\.75",
        unrelated=setting(Local, level=2),
    )


def value_over_that_of_the_class():
    callee = Callee()
    return Case(
        loss=lambda m, b: callee(squared(m, b)),
        change=setting(callee, gain=0.75),
        said=r"callee of <lambda>\.gain was not set and is 0\.75",
        unrelated=setting(callee, level=2),
    )


def method_of_a_class():
    class Local(Callee):
        def __call__(self, loss):
            return loss * 3

    callee = Local()
    return Case(
        loss=lambda m, b: callee(squared(m, b)),
        change=setting(Local, __call__=lambda self, loss: loss * 2),
        said=r"class Local\.__call__ was the function __call__ and is the function <lambda>",
        unrelated=setting(Local, describe=lambda self: "nothing"),
    )


class Mode(enum.Enum):
    PLAIN = 1
    DOUBLE = 2


def member_of_an_enum():
    holder = types.SimpleNamespace(mode=Mode.PLAIN, epoch=0)
    return Case(
        loss=lambda m, b: squared(m, b) * (2 if holder.mode is Mode.DOUBLE else 1),
        change=setting(holder, mode=Mode.DOUBLE),
        said=r"holder of <lambda>\.mode was <Mode\.PLAIN: 1> and is <Mode\.DOUBLE: 2>",
        unrelated=setting(holder, epoch=1),
    )


def what_a_weak_reference_points_to():
    config = Config()
    reference = weakref.ref(config)
    return Case(
        loss=lambda m, b: squared(m, b) * reference().alpha,
        change=setting(config, alpha=0.75),
        said=r"\.alpha was 0\.5 and is 0\.75",
        unrelated=setting(config, epoch=1),
    )


def context_variable():
    scale = contextvars.ContextVar("scale", default=0.5)
    scale.set(0.5)
    return Case(
        loss=lambda m, b: squared(m, b) * scale.get(),
        change=lambda: scale.set(0.75),
        said=r"the context variable scale was 0\.5 and is 0\.75",
    )


# -- functions ----------------------------------------------------------------------------------------------------


def default_argument():
    def weighted(loss, weight=0.5):
        return loss * weight

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=setting(weighted, __defaults__=(0.75,)),
        said=r"the default weight of weighted was 0\.5 and is 0\.75",
    )


def default_argument_by_name():
    def weighted(loss, *, weight=0.5):
        return loss * weight

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=lambda: weighted.__kwdefaults__.__setitem__("weight", 0.75),
        said=r"the default weight of weighted was 0\.5 and is 0\.75",
    )


def list_as_a_default():
    def weighted(loss, weights=[0.5]):  # noqa: B006 - as people write it
        return loss * weights[0]

    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weighted.__defaults__[0], 0, 0.75),
        said=r"the default weights of weighted\[0\] was 0\.5 and is 0\.75",
    )


def argument_of_a_partial():
    weighted = functools.partial(lambda loss, weight: loss * weight, weight=0.5)
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weighted.keywords, "weight", 0.75),
        said=r"weighted of <lambda>'s argument weight was 0\.5 and is 0\.75",
    )


def list_given_to_a_partial():
    weights = [0.5]
    weighted = functools.partial(lambda weights, loss: loss * weights[0], weights)
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=putting(weights, 0, 0.75),
        said=r"weighted of <lambda>'s argument 0\[0\] was 0\.5 and is 0\.75",
    )


def closure_behind_two_lambdas():
    weight = 0.5
    inner = lambda: weight  # noqa: E731
    outer = lambda: inner()  # noqa: E731

    def change():
        nonlocal weight
        weight = 0.75

    return Case(
        loss=lambda m, b: squared(m, b) * outer(),
        change=change,
        said=r"the outer variable weight of <lambda> was 0\.5 and is 0\.75",
    )


def function_put_in_place_of_another():
    def mean(x):
        return x.square().mean()

    def total(x):
        return x.square().sum()

    loss_fn = mean

    def change():
        nonlocal loss_fn
        loss_fn = total

    return Case(
        loss=lambda m, b: loss_fn(m(b)),
        change=change,
        said=r"loss_fn of <lambda> was the function mean and is the function total",
    )


def attribute_of_a_function():
    def weighted(loss):
        return loss * weighted.weight

    weighted.weight, weighted.epoch = 0.5, 0
    return Case(
        loss=lambda m, b: weighted(squared(m, b)),
        change=setting(weighted, weight=0.75),
        said=r"weighted\.weight was 0\.5 and is 0\.75",
        unrelated=setting(weighted, epoch=1),
    )


def method_of_an_object():
    class Scaler:
        def __init__(self):
            self.scale, self.steps = 0.5, 0

        def apply(self, loss):
            return loss * self.scale

    scaler = Scaler()
    bound = scaler.apply
    return Case(
        loss=lambda m, b: bound(squared(m, b)),
        change=setting(scaler, scale=0.75),
        said=r"\.scale was 0\.5 and is 0\.75",
        unrelated=setting(scaler, steps=1),
    )


def what_a_cached_function_reads():
    weights = [0.5]

    @functools.lru_cache
    def weight(_):
        return weights[0]

    def change():
        weights[0] = 0.75
        weight.cache_clear()

    return Case(
        loss=lambda m, b: squared(m, b) * weight(0),
        change=change,
        said=r"weights of weight\[0\] was 0\.5 and is 0\.75",
    )


# -- globals ------------------------------------------------------------------------------------------------------

SETTINGS = types.SimpleNamespace(alpha=0.5)
WEIGHTS = [0.5]
EPOCH = [0]


def global_read_by_a_helper():
    return Case(
        loss=lambda m, b: _weighted(squared(m, b)),
        change=putting(WEIGHTS, 0, 0.75),
        said=r"the global WEIGHTS\S*(?: of tests\S+)?\[0\] was 0\.5 and is 0\.75",
        unrelated=putting(EPOCH, 0, 1),
    )


def _weighted(loss):
    return loss * WEIGHTS[0]


def attribute_of_another_file():
    return Case(
        loss=lambda m, b: squared(m, b) * other_file.ALPHA,
        change=setting(other_file, ALPHA=0.75),
        said=r"the global other_file\S*(?: of tests\S+)?\.ALPHA was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=1),
    )


def global_read_in_another_file():
    return Case(
        loss=lambda m, b: other_file.weighted(squared(m, b)),
        change=setting(other_file, BETA=0.75),
        said=r"the global BETA of tests\.profiler\.helpers_of_steps was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=2),
    )


def global_imported_in_the_function():
    def loss(m, b):
        from tests.profiler.helpers_of_steps import GAMMA

        return squared(m, b) * GAMMA

    return Case(
        loss=loss,
        change=setting(other_file, GAMMA=0.75),
        said=r"tests\.profiler\.helpers_of_steps\.GAMMA was 0\.5 and is 0\.75",
        unrelated=setting(other_file, EPOCH=3),
    )


def name_that_hides_a_builtin():
    return Case(
        loss=lambda m, b: other_file.counted(squared(m, b)),
        change=setting(other_file, len=lambda _: 7),
        said=r"the global len of tests\.profiler\.helpers_of_steps was not set and is the function <lambda>",
    )


def function_of_torch():
    own = nn.functional.tanh
    return Case(
        loss=lambda m, b: nn.functional.tanh(m(b)).square().mean(),
        change=setting(nn.functional, tanh=lambda x: own(x) * 2),
        said=r"tanh was the function tanh and is the function <lambda>",
    )


# -- tensors and modules --------------------------------------------------------------------------------------------


def tensor_put_in_place_of_another():
    holder = types.SimpleNamespace(table=torch.ones(2), epoch=0)
    return Case(
        loss=lambda m, b: (m(b) * holder.table).square().mean(),
        change=setting(holder, table=torch.ones(2)),
        said=r"holder of <lambda>\.table was a tensor torch\.float32\[2\] and is another",
        unrelated=lambda: holder.table.mul_(2),
    )


def tensor_of_another_shape():
    table = torch.ones(2)
    return Case(
        loss=lambda m, b: (m(b) * table).square().mean(),
        change=lambda: table.resize_(1, 2),
        said=r"the outer variable table of <lambda> was torch\.float32\[2\] .* and is torch\.float32\[1, 2\]",
    )


def criterion_put_in_place_of_another():
    holder = types.SimpleNamespace(criterion=nn.MSELoss(), epoch=0)
    return Case(
        loss=lambda m, b: holder.criterion(m(b), b[:, :2]),
        change=setting(holder, criterion=nn.L1Loss()),
        said=r"holder of <lambda>\.criterion was a MSELoss and is a L1Loss",
        unrelated=setting(holder, epoch=1),
    )


def value_of_a_criterion():
    criterion = nn.SmoothL1Loss(beta=1.0)
    return Case(
        loss=lambda m, b: criterion(m(b), b[:, :2]),
        change=setting(criterion, beta=0.5),
        said=r"criterion of <lambda>\.beta was 1\.0 and is 0\.5",
        unrelated=setting(criterion, note="hello"),
    )


def entry_of_a_list_of_modules():
    heads = [nn.Tanh(), nn.ReLU()]
    return Case(
        loss=lambda m, b: heads[0](m(b)).square().mean(),
        change=putting(heads, 0, nn.Sigmoid()),
        said=r"heads of <lambda>\[0\] was a Tanh and is a Sigmoid",
    )


def mode_of_a_module_outside():
    teacher = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).requires_grad_(False).eval()
    return Case(
        loss=lambda m, b: (m(b) - teacher(b)).square().mean(),
        change=lambda: teacher.train(),
        said=r"teacher of <lambda>\.training was False and is True",
    )


def parameter_of_a_module_outside():
    teacher = nn.Linear(3, 2).requires_grad_(False)
    return Case(
        loss=lambda m, b: (m(b) - teacher(b)).square().mean(),
        change=setting(teacher, weight=nn.Parameter(torch.ones(2, 3), requires_grad=False)),
        said=r"parameter weight of the outer variable teacher of <lambda> was replaced by another",
        unrelated=lambda: teacher.weight.data.mul_(2),
    )


def buffer_of_a_module_outside():
    teacher = nn.BatchNorm1d(3).eval().requires_grad_(False)
    return Case(
        loss=lambda m, b: m(teacher(b)).square().mean(),
        change=setting(teacher, running_mean=torch.ones(3)),
        said=r"buffer running_mean of the outer variable teacher of <lambda> was replaced by another",
    )


class Buffered(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.inner = linear()
        self.register_buffer("one", torch.ones(2))
        self.register_buffer("two", self.one if tied else torch.ones(2))

    def forward(self, x):
        self.two.mul_(0.5)
        return self.inner(x) * self.one


def buffer_that_is_untied():
    model = Buffered(tied=True)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(model, two=torch.ones(2)),
        said=r"buffer two was the buffer one and is one of its own",
    )


def buffer_that_is_tied():
    model = Buffered(tied=False)
    return Case(
        model=model,
        step=step_of(squared),
        change=lambda: setattr(model, "two", model.one),
        said=r"buffer two was one of its own and is the buffer one",
        unrelated=setting(model, two=torch.ones(2)),
    )


class Deep(nn.Module):
    """Reads of its own that are not plain attributes."""

    def __init__(self):
        super().__init__()
        self.inner = linear()
        self.cfg = types.SimpleNamespace(loss={"scale": 0.5, "epoch": 0})
        self.extra = [nn.Tanh()]
        self.calls = 0
        self.seen = []

    def forward(self, x):
        self.calls += 1
        self.seen.append(tuple(x.shape))
        return self.extra[0](self.inner(x)) * self.cfg.loss["scale"]


def entry_behind_a_module():
    model = Deep()
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(model.cfg.loss, "scale", 0.75),
        said=r"module model\.cfg\.loss\['scale'\] was 0\.5 and is 0\.75",
        unrelated=lambda: (putting(model.cfg.loss, "epoch", 1)(), model.seen.clear(), setattr(model, "calls", 9)),
    )


def module_in_a_list_of_a_module():
    model = Deep()
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(model.extra, 0, nn.ReLU()),
        said=r"module model\.extra\[0\] was a Tanh and is a ReLU",
    )


def forward_of_a_class():
    class Local(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    return Case(
        model=Local(3, 2),
        step=step_of(squared),
        change=setting(Local, forward=lambda self, x: 2 * nn.Linear.forward(self, x)),
        said=r"class Local\.forward was the function forward and is the function <lambda>",
    )


def forward_of_a_class_of_torch():
    own = nn.Linear.forward
    return Case(
        model=nn.Sequential(linear()),
        step=step_of(squared),
        change=setting(nn.Linear, forward=lambda self, x: 2 * own(self, x)),
        said=r"class Linear\.forward was the function forward and is the function <lambda>",
    )


def forward_of_a_module_alone():
    model = linear()
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(model, forward=lambda x: x @ model.weight.T),
        said=r"module model\.forward was not set and is the function <lambda>",
    )


# -- hooks --------------------------------------------------------------------------------------------------------


def closure_of_a_gradient_hook():
    model, scale = linear(), [0.5]
    model.weight.register_hook(lambda gradient: gradient * scale[0])
    return Case(
        model=model,
        step=step_of(squared),
        change=putting(scale, 0, 0.75),
        said=r"the outer variable scale of <lambda>\[0\] was 0\.5 and is 0\.75",
    )


def closure_of_a_forward_hook():
    model, cfg = linear(), Config()
    model.register_forward_hook(lambda module, args, out: out * cfg.alpha)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(cfg, alpha=0.75),
        said=r"the outer variable cfg of <lambda>\.alpha was 0\.5 and is 0\.75",
        unrelated=setting(cfg, epoch=1),
    )


def object_of_a_backward_hook():
    class Clip:
        def __init__(self):
            self.limit, self.calls = 0.5, 0

        def __call__(self, module, before, after):
            self.calls += 1
            return (None if before[0] is None else before[0].clamp(-self.limit, self.limit),)

    model, clip = nn.Sequential(linear(), linear_of(2)), Clip()
    model[1].register_full_backward_hook(clip)
    return Case(
        model=model,
        step=step_of(squared),
        change=setting(clip, limit=0.25),
        said=r"a hook of module 1\.limit was 0\.5 and is 0\.25",
        unrelated=setting(clip, calls=9),
    )


def linear_of(width):
    return nn.Linear(width, 2)


# -- arrays and exact equality ----------------------------------------------------------------------------------------


def numpy_array():
    table = np.array([0.5, 2.0])
    return Case(
        loss=lambda m, b: squared(m, b) * float(table[0]),
        change=putting(table, 0, 0.75),
        said=r"the content of the outer variable table of <lambda> was .* and is",
    )


def exact(then, now):
    holder = types.SimpleNamespace(value=then, epoch=0)
    return Case(
        loss=lambda m, b: squared(m, b) * (1 if holder.value is None else 2),
        change=setting(holder, value=now),
        said=r"holder of <lambda>\.value was .* and is",
        unrelated=setting(holder, epoch=1),
    )


def zero_and_minus_zero():
    return exact(0.0, -0.0)


def integers_and_floats_in_a_tuple():
    return exact((2,), (2.0,))


def true_and_one():
    return exact(True, 1)


def complex_zeros():
    return exact(complex(0.0, 0.0), complex(0.0, -0.0))


CASES = [
    entry_of_a_list, length_of_a_list, entry_of_a_dict_by_its_key, missing_key_of_a_dict, dict_that_is_gone_through,
    order_of_a_dict, nested_containers, element_of_a_set, entry_of_a_deque, list_put_in_place_of_another,
    dataclass, simple_namespace, argparse_namespace, slots, object_with_a_lookup_of_its_own, dict_with_attributes,
    inner_object, object_put_in_place_of_another, named_tuple_that_holds_a_list, backing_field_of_a_property,
    attribute_that_was_missing, attribute_by_a_computed_name, attribute_by_vars, attribute_by_asdict,
    value_of_a_class, value_over_that_of_the_class, method_of_a_class, member_of_an_enum,
    what_a_weak_reference_points_to, context_variable,
    default_argument, default_argument_by_name, list_as_a_default, argument_of_a_partial, list_given_to_a_partial,
    closure_behind_two_lambdas, function_put_in_place_of_another, attribute_of_a_function, method_of_an_object,
    what_a_cached_function_reads,
    global_read_by_a_helper, attribute_of_another_file, global_read_in_another_file, global_imported_in_the_function,
    name_that_hides_a_builtin, function_of_torch,
    tensor_put_in_place_of_another, tensor_of_another_shape, criterion_put_in_place_of_another, value_of_a_criterion,
    entry_of_a_list_of_modules, mode_of_a_module_outside, parameter_of_a_module_outside, buffer_of_a_module_outside,
    buffer_that_is_untied, buffer_that_is_tied, entry_behind_a_module, module_in_a_list_of_a_module,
    forward_of_a_class, forward_of_a_class_of_torch, forward_of_a_module_alone,
    closure_of_a_gradient_hook, closure_of_a_forward_hook, object_of_a_backward_hook,
    numpy_array, zero_and_minus_zero, integers_and_floats_in_a_tuple, true_and_one, complex_zeros,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _torch_and_files_as_before():
    kept = [(holder, dict(vars(holder))) for holder in (nn.functional, nn.Linear, other_file)]
    WEIGHTS[0], EPOCH[0] = 0.5, 0
    yield
    for holder, before in kept:
        for name in [name for name in vars(holder) if name not in before]:
            delattr(holder, name)
        for name, value in before.items():
            if vars(holder)[name] is not value:
                setattr(holder, name, value)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_of_what_the_step_reads_is_noticed_by_name_and_another_is_not(make):
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
