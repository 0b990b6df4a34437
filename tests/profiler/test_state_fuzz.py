"""Small steps that read state in random ways, changed at random between calls: captured equals eager, or it is told."""

import array
import contextvars
import dataclasses
import enum
import functools
import operator
import types
import warnings
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner.errors import PlannerError
from profiler.tracing.whole_step import capture

EXAMPLES = 25  # a second or two; some thousands were run once
CALLS = 3

# -- where a number is held: how to read it, and how to make it another ----------------------------------------------

Source = tuple[Callable[[], Any], Callable[[float], Any]]
SHARED = {"number": 1.0, "deep": {"number": 1.0}}


class Choice(enum.Enum):
    ONE, TWO, THREE = 1.0, 2.0, 3.0


class Config:
    shared = 1.0
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.number, self.slot, self.entries, self.inner = 1.0, 1.0, [1.0, 1.0], {"number": 1.0}

    @property
    def backed(self) -> float:
        return self.number + 0.5

    def method(self) -> float:
        return self.number * 2

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


def attribute() -> Source:
    config = Config()
    return (lambda: config.number), (lambda new: setattr(config, "number", new))


def slot() -> Source:
    config = Config()
    return (lambda: config.slot), (lambda new: setattr(config, "slot", new))


def property_() -> Source:
    config = Config()
    return (lambda: config.backed), (lambda new: setattr(config, "number", new))


def method() -> Source:
    config = Config()
    bound = config.method
    return (lambda: bound()), (lambda new: setattr(config, "number", new))


def subscripted() -> Source:
    config = Config()
    return (lambda: config["number"]), (lambda new: setattr(config, "number", new))


def of_the_class() -> Source:
    class Own(Config):
        pass

    config = Own()
    return (lambda: config.shared), (lambda new: setattr(Own, "shared", new))


def by_computed_name() -> Source:
    config, name = Config(), "num"
    return (lambda: getattr(config, name + "ber")), (lambda new: setattr(config, "number", new))


def entry() -> Source:
    held = {"number": 1.0, "other": 7.0}
    return (lambda: held["number"]), (lambda new: held.update(number=new))


def entry_that_appears() -> Source:
    held: dict[str, float] = {}
    return (lambda: held.get("number", 1.0)), (lambda new: held.update(number=new))


def entry_in_attribute() -> Source:
    config = Config()
    return (lambda: config.inner["number"]), (lambda new: config.inner.update(number=new))


def item() -> Source:
    held = [[1.0], [2.0]]
    return (lambda: held[0][-1]), (lambda new: held[0].__setitem__(0, new))


def length() -> Source:
    held = [1.0]
    return (lambda: float(len(held))), (lambda new: held.append(new))


def summed() -> Source:
    held = deque([1.0, 2.0], maxlen=3)
    return (lambda: sum(held)), (lambda new: held.append(new))


def order() -> Source:
    held = OrderedDict(a=1.0, b=2.0)
    return (lambda: next(iter(held.values()))), (lambda new: held.move_to_end("a", last=new > 1.5))


def element() -> Source:
    held = {1.0}
    return (lambda: 2.0 if 5.0 in held else 1.0), (lambda new: held.add(5.0) if new > 1.5 else held.discard(5.0))


def closed_over() -> Source:
    number = 1.0

    def helper() -> float:
        return number

    def change(new: float) -> None:
        nonlocal number
        number = new

    return (lambda: helper()), change


def global_entry() -> Source:
    SHARED["number"] = 1.0
    return (lambda: SHARED["number"]), (lambda new: SHARED.update(number=new))


def deep_global_entry() -> Source:
    deep: dict[str, float] = {"number": 1.0}
    SHARED["deep"] = deep
    return (lambda: SHARED["deep"]["number"]), (lambda new: SHARED.update(deep={"number": new}))


def default() -> Source:
    def helper(number: float = 1.0) -> float:
        return number

    return (lambda: helper()), (lambda new: setattr(helper, "__defaults__", (new,)))


def keyword_default() -> Source:
    def helper(*, number: float = 1.0) -> float:
        return number

    return (lambda: helper()), (lambda new: setattr(helper, "__kwdefaults__", {"number": new}))


def partial() -> Source:
    helper = functools.partial(operator.mul, 2.0)
    held = [functools.partial(helper, 1.0)]
    return (lambda: held[0]()), (lambda new: held.__setitem__(0, functools.partial(helper, new)))


def data_class() -> Source:
    @dataclasses.dataclass
    class Data:
        number: float = 1.0

    data = Data()
    return (lambda: dataclasses.asdict(data)["number"]), (lambda new: setattr(data, "number", new))


def named_tuple() -> Source:
    kind = namedtuple("kind", "number")
    held = types.SimpleNamespace(value=kind(1.0))
    return (lambda: held.value.number), (lambda new: setattr(held, "value", kind(new)))


def choice() -> Source:
    held = types.SimpleNamespace(choice=Choice.ONE)
    return (lambda: held.choice.value), (lambda new: setattr(held, "choice", Choice.TWO if new > 1.5 else Choice.THREE))


def numpy_scalar() -> Source:
    held = {"number": np.float32(1.0)}
    return (lambda: float(held["number"])), (lambda new: held.update(number=np.float32(new)))


def numpy_array() -> Source:
    held = np.ones(3)
    return (lambda: float(held[1])), (lambda new: held.__setitem__(1, new))


def tensor_in_place() -> Source:
    held = torch.ones(())
    return (lambda: held), (lambda new: held.fill_(new))


def tensor_put_elsewhere() -> Source:
    held = {"tensor": torch.ones(())}
    return (lambda: held["tensor"]), (lambda new: held.update(tensor=torch.full((), new)))


def tensor_that_decides() -> Source:
    held = torch.ones(())
    return (lambda: 2.0 if held.item() > 1.5 else 1.0), (lambda new: held.fill_(new))


def tensor_number() -> Source:
    held = torch.ones(())
    return (lambda: held.item() * 0.5), (lambda new: held.fill_(new))


def patched_function() -> Source:
    held = types.SimpleNamespace(function=lambda: 1.0)
    return (lambda: held.function()), (lambda new: setattr(held, "function", lambda: new))


def code_of_a_function() -> Source:
    def helper() -> float:
        return 1.0

    one, two = helper.__code__, (lambda: 2.0).__code__
    return (lambda: helper()), (lambda new: setattr(helper, "__code__", two if new > 1.5 else one))


def unset_slot() -> Source:
    class Slotted:
        __slots__ = ("number",)

    held = Slotted()
    return (lambda: getattr(held, "number", 1.0)), (lambda new: setattr(held, "number", new))


def context_variable() -> Source:
    held = contextvars.ContextVar("held", default=1.0)
    return (lambda: held.get()), (lambda new: held.set(new))


def of_a_metaclass() -> Source:
    class Meta(type):
        @property
        def number(cls) -> float:
            return cls.backing  # type: ignore[attr-defined]

    class Held(metaclass=Meta):
        backing = 1.0

    return (lambda: Held.number), (lambda new: setattr(Held, "backing", new))


def matched() -> Source:
    config = Config()

    def helper() -> float:
        match config:
            case Config(number=1.0):
                return 1.0
            case _:
                return 3.0

    return helper, (lambda new: setattr(config, "number", new))


def matched_by_position() -> Source:
    @dataclasses.dataclass
    class Data:
        number: float = 1.0

    data = Data()

    def helper() -> float:
        match data:
            case Data(number):
                return number
        return 0.0

    return helper, (lambda new: setattr(data, "number", new))


def defaulted() -> Source:
    held: Any = defaultdict(lambda: 1.0)
    return (lambda: held["number"]), (lambda new: held.update(number=new))


def missing() -> Source:
    class Filling(dict[str, float]):
        fill = 1.0

        def __missing__(self, key: str) -> float:
            return self.fill

    held = Filling()
    return (lambda: held["number"]), (lambda new: setattr(held, "fill", new))


def user_dict() -> Source:
    held = UserDict(number=1.0)
    return (lambda: held["number"]), (lambda new: held.update(number=new))


def chained() -> Source:
    below = {"number": 1.0}
    held = ChainMap({}, below)
    return (lambda: held["number"]), (lambda new: below.update(number=new))


def proxied() -> Source:
    below = {"number": 1.0}
    held = types.MappingProxyType(below)
    return (lambda: held["number"]), (lambda new: below.update(number=new))


def descriptor() -> Source:
    class Stored:
        def __init__(self) -> None:
            self.of: Any = weakref.WeakKeyDictionary()

        def __get__(self, owner: Any, _: Any) -> Any:
            return self.of.get(owner, 1.0)

        def __set__(self, owner: Any, new: float) -> None:
            self.of[owner] = new

    class Owner:
        number = Stored()

    owner = Owner()
    return (lambda: owner.number), (lambda new: setattr(owner, "number", new))


def delegated() -> Source:
    class Outer:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    config = Config()
    outer = Outer(Outer(config))
    return (lambda: outer.number), (lambda new: setattr(config, "number", new))


def cached_property() -> Source:
    class Holder:
        number = 1.0

        @functools.cached_property
        def derived(self) -> float:
            return self.number * 2

    holder = Holder()
    return (lambda: holder.derived), (lambda new: vars(holder).update(derived=new))


def typed_array() -> Source:
    held = array.array("d", [1.0, 2.0])
    return (lambda: held[0]), (lambda new: held.__setitem__(0, new))


def bytes_written() -> Source:
    held = bytearray(b"\x01\x02")
    return (lambda: float(held[0])), (lambda new: held.__setitem__(0, int(abs(new))))


def attribute_of_a_function() -> Source:
    def helper() -> float:
        return helper.number  # type: ignore[attr-defined]

    helper.number = 1.0  # type: ignore[attr-defined]
    return (lambda: helper()), (lambda new: setattr(helper, "number", new))


def class_of_an_object() -> Source:
    class One:
        number = 1.0

    class Two:
        number = 2.0

    held = One()
    return (lambda: held.number), (lambda new: setattr(held, "__class__", Two if new > 1.5 else One))


def by_attrgetter() -> Source:
    outer, get = types.SimpleNamespace(inner=types.SimpleNamespace(number=1.0)), operator.attrgetter("inner.number")
    return (lambda: get(outer)), (lambda new: setattr(outer.inner, "number", new))


def module_attribute() -> Source:
    held = types.ModuleType("held")
    held.number = 1.0  # type: ignore[attr-defined]
    return (lambda: held.number), (lambda new: setattr(held, "number", new))


def base_class_put_in() -> Source:
    class Base:
        number = 1.0

    class Own(Base):
        pass

    config = Own()
    return (lambda: config.number), (lambda new: setattr(Own, "number", new))


def keys_view() -> Source:
    below = {"a": 1.0}
    held = below.values()
    return (lambda: sum(held)), (lambda new: below.update(b=new))


SOURCES = [
    attribute, slot, property_, method, subscripted, of_the_class, by_computed_name, entry, entry_that_appears,
    entry_in_attribute, item, length, summed, order, element, closed_over, global_entry, deep_global_entry, default,
    keyword_default, partial, data_class, named_tuple, choice, numpy_scalar, numpy_array, tensor_in_place,
    tensor_put_elsewhere, tensor_that_decides, tensor_number, patched_function, code_of_a_function, unset_slot,
    context_variable, of_a_metaclass, matched, matched_by_position, defaulted,
    missing, user_dict, chained, proxied, descriptor, delegated, cached_property, typed_array, bytes_written,
    attribute_of_a_function, class_of_an_object, by_attrgetter, module_attribute, base_class_put_in, keys_view,
]  # fmt: skip

# -- by which way the step comes to it -------------------------------------------------------------------------------


class Calling:
    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __call__(self) -> Any:
        return self.read()


WAYS: list[Callable[[Callable[[], Any]], Callable[[], Any]]] = [
    lambda read: read,
    lambda read: lambda: read(),
    lambda read: functools.partial(lambda f: f(), read),
    lambda read: Calling(read),
    lambda read: lambda: sum(one() for one in [read]),
    lambda read: lambda: next(map(operator.call, (read,))),
    lambda read: lambda: max([read], key=lambda f: 0)(),
]

# -- what it does with it ---------------------------------------------------------------------------------------------

USES: list[Callable[[Any, Any], Any]] = [
    lambda x, number: x * number,
    lambda x, number: x + number,
    lambda x, number: x.relu() if number > 1.5 else x.tanh(),
    lambda x, number: x if number == 1.0 else x * 3,
    lambda x, number: torch.clamp(x, max=number),
]

Read = tuple[int, int, int]  # a source, a way, a use
reads = st.tuples(*(st.integers(0, len(options) - 1) for options in (SOURCES, WAYS, USES)))
changes = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1.0, 2.0, 3.0, -0.0, 0.0])), max_size=2)


class World:
    """A step, what it reads, and a model, made twice from the same plan."""

    def __init__(self, plan: list[Read]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        sources = [SOURCES[source]() for source, _, _ in plan]
        self.changes = [change for _, change in sources]
        uses = [(WAYS[way](read), USES[use]) for (read, _), (_, way, use) in zip(sources, plan, strict=True)]

        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            optimizer.zero_grad()
            x = model(batch)
            for read, use in uses:
                x = use(x, read())
            loss = x.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.step = step
        self.traced: Any = None

    def change(self, wanted: list[tuple[int, float]]) -> None:
        for which, new in wanted:
            if which < len(self.changes):
                self.changes[which](new)

    def run(self, batch: Any) -> Any:
        return self.step(self.model, self.optimizer, batch)

    def run_captured(self, batch: Any) -> Any:
        if self.traced is None or self.traced.convention.check(batch):
            self.traced = capture(self.step, self.model, self.optimizer, batch)
        return self.traced.run(batch)


def outcomes(plan: list[Read], story: list[list[tuple[int, float]]], call: Callable[[World, Any], Any]) -> list[Any]:
    world, seen = World(plan), []
    for wanted in [[], *story]:
        world.change(wanted)
        seen.append(call(world, torch.linspace(-1, 1, 12).view(4, 3)))
        seen += [p.detach().clone() for p in world.model.parameters()]
    return seen


@settings(max_examples=EXAMPLES, deadline=None)
@given(plan=st.lists(reads, min_size=1, max_size=3), story=st.lists(changes, min_size=CALLS - 1, max_size=CALLS - 1))
def test_a_captured_step_is_the_step_or_says_why_not(plan, story):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            captured = outcomes(plan, story, World.run_captured)
        except PlannerError:
            return
    if told:
        return
    assert all(map(torch.equal, outcomes(plan, story, World.run), captured))
