"""Whatever a step reads of containers and objects: a change is noticed by name, and no other is."""

import argparse
import collections
import contextvars
import dataclasses
import enum
import functools
import types
import weakref
from typing import Any, NamedTuple

import pytest

from tests.profiler.reach_cases import Case, Config, assert_noticed, putting, setting, squared

# -- containers -------------------------------------------------------------------------------------------------------


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


# -- objects ----------------------------------------------------------------------------------------------------------


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


class Cached:
    def __init__(self):
        self.base, self.epoch = 0.25, 0

    @functools.cached_property
    def alpha(self):
        return self.base * 2


def value_over_one_that_the_step_caches():
    holder = Cached()
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=setting(holder, alpha=0.75),
        said=r"holder of <lambda>\.alpha was not set and is 0\.75",
        unrelated=setting(holder, epoch=1),
    )


def value_cached_before(change):
    holder = Cached()
    assert holder.alpha == 0.5
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=lambda: change(holder),
        said=r"holder of <lambda>\.alpha was 0\.5 and is ",
        unrelated=setting(holder, base=1.0),
    )


def cached_value_written_over():
    return value_cached_before(lambda holder: vars(holder).update(alpha=0.75))


def cached_value_that_is_gone():
    return value_cached_before(lambda holder: delattr(holder, "alpha"))


def list_that_the_step_fills_once():
    made = []

    def filled():
        if not made:
            made.append(0.5)
        return made[0]

    return Case(
        loss=lambda m, b: squared(m, b) * filled(),
        change=lambda: made.append(0.75),
        said=r"made of filled had 0 entries and has 1",
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


def class_of_an_object():
    one, other = (type(name, (), {"alpha": alpha}) for name, alpha in (("One", 0.5), ("Other", 0.75)))
    holder = one()
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=setting(holder, __class__=other),
        said=r"holder of <lambda> is of another class",
    )


def value_of_a_metaclass():
    meta = type("Meta", (type,), {"alpha": 0.5})
    holder = meta("Holder", (), {})
    return Case(
        loss=lambda m, b: squared(m, b) * holder.alpha,
        change=setting(meta, alpha=0.75),
        said=r"class Meta\.alpha was 0\.5 and is 0\.75",
    )


def truth_of_an_object():
    kind = type("Switch", (), {})
    switch = kind()
    return Case(
        loss=lambda m, b: squared(m, b) * (0.5 if switch else 0.75),
        change=setting(kind, __bool__=lambda self: False),
        said=r"class Switch\.__bool__ was not set",
    )


def which_of_two_marks():
    kind = type("Mark", (), {})
    one, other = kind(), kind()
    chosen = types.SimpleNamespace(mark=one)
    return Case(
        loss=lambda m, b: squared(m, b) * (0.5 if chosen.mark is one else 0.75),
        change=setting(chosen, mark=other),
        said=r"chosen of <lambda>\.mark was a Mark and is another",
    )


def factory_of_a_dict():
    made = collections.defaultdict(lambda: 0.5)
    return Case(
        loss=lambda m, b: squared(m, b) * made.default_factory(),
        change=setting(made, default_factory=lambda: 0.75),
        said=r"made of <lambda>\.default_factory was the function <lambda> and is another",
    )


def value_of_a_member_of_an_enum():
    kind = enum.Enum("Kind", {"ONE": {"alpha": 0.5}})
    return Case(
        loss=lambda m, b: squared(m, b) * kind.ONE.value["alpha"],
        change=putting(kind.ONE.value, "alpha", 0.75),
        said=r"\.value\['alpha'\] was 0\.5 and is 0\.75",
    )


CASES = [
    class_of_an_object, value_of_a_metaclass, truth_of_an_object, which_of_two_marks, factory_of_a_dict,
    value_of_a_member_of_an_enum, value_over_one_that_the_step_caches, cached_value_written_over,
    cached_value_that_is_gone, list_that_the_step_fills_once,
    entry_of_a_list, length_of_a_list, entry_of_a_dict_by_its_key, missing_key_of_a_dict, dict_that_is_gone_through,
    order_of_a_dict, nested_containers, element_of_a_set, entry_of_a_deque, list_put_in_place_of_another, dataclass,
    simple_namespace, argparse_namespace, slots, object_with_a_lookup_of_its_own, dict_with_attributes,
    inner_object, object_put_in_place_of_another, named_tuple_that_holds_a_list, backing_field_of_a_property,
    attribute_that_was_missing, attribute_by_a_computed_name, attribute_by_vars, attribute_by_asdict,
    value_of_a_class, value_over_that_of_the_class, method_of_a_class, member_of_an_enum,
    what_a_weak_reference_points_to, context_variable,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*by a weak reference alone")
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_change_of_what_the_step_reads_is_noticed_by_name_and_another_is_not(make):
    assert_noticed(make)
