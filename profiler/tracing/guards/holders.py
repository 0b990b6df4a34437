"""The kinds of objects that hold values: how each is read, named in a sentence, and checked in a few instructions."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter, itemgetter, length_hint
from types import FunctionType, GeneratorType, MemberDescriptorType
from typing import Any, ClassVar

import numpy as np

from profiler.tracing.guards.exact import UNSET

# A callable, what it is called with, and the objects that it must give, in their order.
Probe = tuple[Callable[[Any], Iterable[Any]], Any, tuple[Any, ...]]


class Selection(Enum):
    """Which of the values of a holder count."""

    NAMES = "those that code reads as attributes"
    VARIABLES = "those that functions read as globals or outer variables"
    KEYS = "those keys that code reads of a container"
    ALL = "all of them"
    DRAWN = "all of them, and only what a step itself changes: who draws from it changes it"


class Kind:
    """How one kind of object holds values. `read` gives them by key; it runs none of the user's code."""

    selection: ClassVar[Selection] = Selection.ALL
    sized: ClassVar[bool] = False  # whether one value more is a change, too
    probed: ClassVar[bool] = True  # whether probes tell; else what it holds is compared each time

    def read(self, what: Any) -> dict[Any, Any]:
        """What the object holds now."""
        raise NotImplementedError

    def label(self, path: str, key: Any) -> str:
        """What a sentence calls one of the values."""
        return f"{path}.{key}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        """What to call to see that these are still the object's values; `sized` says that they are all of them."""
        return []


def _named(table: Any, values: Mapping[Any, Any]) -> list[Probe]:
    """A probe of several entries of one mapping."""
    if not values:
        return []
    keys = list(values)
    keys = keys * 2 if len(keys) == 1 else keys  # of one key an itemgetter gives no tuple
    return [(itemgetter(*keys), table, tuple(values[key] for key in keys))]


# -- objects, classes, namespaces -----------------------------------------------------------------------------


def own_dict(what: Any) -> dict[str, Any]:
    """The `__dict__` of an object, without asking the object."""
    try:
        found = object.__getattribute__(what, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _slots(kind: type) -> list[str]:
    members = [vars(cls).items() for cls in kind.__mro__]
    return [name for own in members for name, value in own if isinstance(value, MemberDescriptorType)]


def _slot_values(what: Any) -> dict[str, Any]:
    found = {name: getattr(type(what), name).__get__(what) for name in _slots(type(what)) if _is_set(what, name)}
    return {name: value for name, value in found.items() if value is not what}


def _is_set(what: Any, name: str) -> bool:
    try:
        getattr(type(what), name).__get__(what)
    except AttributeError:
        return False
    return True


class Attributes(Kind):
    """What an object has in its `__dict__` and its `__slots__`."""

    selection = Selection.NAMES

    def __init__(self, *, without: frozenset[str] = frozenset()) -> None:
        self.without = without  # what something else looks after

    def read(self, what: Any) -> dict[Any, Any]:
        own = own_dict(what)
        kept = {name: value for name, value in own.items() if name not in self.without} if self.without else own
        return _slot_values(what) | kept

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        own = own_dict(what)
        slots = {name: value for name, value in values.items() if name not in own}
        found = _named(own, {name: value for name, value in values.items() if name in own})
        return found + [(_alone(attrgetter(name)), what, (value,)) for name, value in slots.items()]


def _alone(getter: Callable[[Any], Any]) -> Callable[[Any], Iterable[Any]]:
    return lambda what: (getter(what),)


class Members(Kind):
    """What a class gives its objects."""

    selection = Selection.NAMES

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(vars(what))

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return _named(vars(what), values)


class Variables(Members):
    """The globals of a Python module, as attributes of it."""


class Globals(Kind):
    """The globals of a Python module, as its functions read them."""

    selection = Selection.VARIABLES

    def __init__(self, *, suffix: str) -> None:
        self._suffix = suffix

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(what)

    def label(self, path: str, key: Any) -> str:
        return f"the global {key}{self._suffix}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return _named(what, values)


# -- containers -----------------------------------------------------------------------------------------------


class Entries(Kind):
    """What a dict holds."""

    selection = Selection.KEYS
    sized = True

    def read(self, what: Any) -> dict[Any, Any]:
        base = _dict_base(what)
        return dict(zip(base.keys(what), base.values(what), strict=True))

    def label(self, path: str, key: Any) -> str:
        return f"{path}[{key!r}]"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        base = _dict_base(what)
        if not sized:
            return _named(what if type(what) is base else _Raw(what), values)
        return [(base.__iter__, what, tuple(values)), (base.values, what, tuple(values.values()))]


def _dict_base(what: dict[Any, Any]) -> type[dict[Any, Any]]:
    """The class that knows the order of a dict, below what the user's class makes of it."""
    return OrderedDict if isinstance(what, OrderedDict) else dict


class _Raw:
    """A dict without what its class makes of it."""

    def __init__(self, what: dict[Any, Any]) -> None:
        self._what = what

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._what, key)


class Huge(Kind):
    """What is too large to be noted."""

    selection = Selection.KEYS

    def read(self, what: Any) -> dict[Any, Any]:
        return {}


class View(Kind):
    """What a read-only view of a dict shows."""

    selection = Selection.KEYS
    sized = True

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(what)

    def label(self, path: str, key: Any) -> str:
        return f"{path}[{key!r}]"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return _named(what, values)


class Items(Kind):
    """What a list, tuple or deque holds."""

    selection = Selection.KEYS
    sized = True

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(enumerate(_iterator_of(what)(what)))

    def label(self, path: str, key: Any) -> str:
        return f"{path}[{key}]"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        if isinstance(what, tuple):
            return []
        return [(_iterator_of(what), what, tuple(values.values()))]


def _iterator_of(what: Any) -> Callable[[Any], Iterable[Any]]:
    base = next(base for base in (list, tuple, deque) if isinstance(what, base))
    return base.__iter__


class Elements(Kind):
    """What a set holds."""

    selection = Selection.KEYS
    sized = True

    def read(self, what: Any) -> dict[Any, Any]:
        base = set if isinstance(what, set) else frozenset
        return {(type(value), value): value for value in base.__iter__(what)}

    def label(self, path: str, key: Any) -> str:
        return f"the element {key[1]!r} of {path}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return [(iter, what, tuple(values.values()))] if sized and isinstance(what, set) else []


# -- functions ------------------------------------------------------------------------------------------------


class Cells(Kind):
    """The variables that a function has closed over."""

    selection = Selection.VARIABLES

    def read(self, what: FunctionType) -> dict[Any, Any]:
        cells = zip(what.__code__.co_freevars, what.__closure__ or (), strict=True)
        return {name: _contents(cell) for name, cell in cells}

    def label(self, path: str, key: Any) -> str:
        return f"the outer variable {key}{path}"

    def probes(self, what: FunctionType, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        cells = dict(zip(what.__code__.co_freevars, what.__closure__ or (), strict=True))
        return [(_alone(_contents), cells[name], (value,)) for name, value in values.items()]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable was deleted, or has no value yet
        return UNSET


class Defaults(Kind):
    """A function's code, and the values of the arguments that a call leaves out."""

    def read(self, what: FunctionType) -> dict[Any, Any]:
        code, defaults = what.__code__, what.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
        return {"": code} | dict(zip(positional, defaults, strict=True)) | (what.__kwdefaults__ or {})

    def label(self, path: str, key: Any) -> str:
        return f"the default {key} of {path}" if key else f"the code of {path}"

    def probes(self, what: FunctionType, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
        by_name = what.__kwdefaults__ or {}
        own = {name: value for name, value in values.items() if name in by_name}
        return [(parts, what, parts(what)), *_named(by_name, own)]


class Arguments(Kind):
    """What a partial gives to its function."""

    def read(self, what: partial[Any]) -> dict[Any, Any]:
        return {"": what.func} | dict(enumerate(what.args)) | what.keywords

    def label(self, path: str, key: Any) -> str:
        return f"{path}'s argument {key}"

    def probes(self, what: partial[Any], values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return _named(what.keywords, {name: value for name, value in values.items() if name in what.keywords})


# -- what has a state of its own ------------------------------------------------------------------------------

LARGEST_ARRAY_BYTES = 1 << 20


class Bytes(Kind):
    """What a numpy array holds."""

    probed = False

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": (str(what.dtype), what.shape, what.strides, what.tobytes())}

    def label(self, path: str, key: Any) -> str:
        return f"the content of {path}"


class Context(Kind):
    """The value of a context variable."""

    def read(self, what: ContextVar[Any]) -> dict[Any, Any]:
        return {"": what.get(UNSET)}

    def label(self, path: str, key: Any) -> str:
        return path

    def probes(self, what: ContextVar[Any], values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return [(lambda var: (var.get(UNSET),), what, tuple(values.values()))]


class State(Kind):
    """Where a generator of random numbers or an iterator stands."""

    selection = Selection.DRAWN

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": _state(what)}

    def label(self, path: str, key: Any) -> str:
        return f"the state of {path}"


def has_state(what: Any) -> bool:
    """Whether an object is a generator of random numbers or an iterator whose position can be told."""
    return _state(what) is not None


def _state(what: Any) -> Any:
    if isinstance(what, random.Random):
        return what.getstate()
    if isinstance(what, np.random.Generator):
        return repr(what.bit_generator.state)
    if isinstance(what, np.random.RandomState):
        return repr(what.get_state(legacy=False))
    if isinstance(what, GeneratorType):
        frame = what.gi_frame
        return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
    if type(what).__name__ == "count":
        return repr(what)
    return (length_hint(what),) if hasattr(type(what), "__next__") and hasattr(type(what), "__length_hint__") else None


# -- one of them ----------------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True, slots=True)
class Holder:
    """An object that the step can reach, where it was found, and what it held before the step ran."""

    path: str
    what: Any
    kind: Kind
    before: dict[Any, Any] = field(init=False)
    names: set[str] = field(default_factory=set)  # under which code finds it, or what functions read of it
    partial: bool = False  # whether only a few of its entries are noted, because there are so many
    late: bool = False  # whether it is noted after the step, because no step changes it, and capture may
    lenient: bool = False  # whether it belongs to an installed library, whose registries may grow
    whole: bool = False  # whether it was found as a part of something, so that all of it may be read

    def __post_init__(self) -> None:
        self.before = self.kind.read(self.what)

    def label(self, key: Any) -> str:
        """What a sentence calls one of its values."""
        return self.kind.label(self.path, key)

    def now(self) -> dict[Any, Any]:
        """What it holds now."""
        return self.kind.read(self.what)
