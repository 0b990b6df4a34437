"""What has values under names: objects, tensors, classes, Python modules."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, empty
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import _symbolic_trace

from profiler.tracing.guards.exact import UNSET
from profiler.tracing.guards.kinds.kind import Kind, Probe, Selection, alone, named, rewritten

# Files of functions that stand in the place of others while something is traced.
_WRAPPING = (_symbolic_trace.__file__, str(Path(__file__).parents[2] / "eager_ways" / "metrics.py"))


def own_dict(what: Any) -> dict[str, Any]:
    """The `__dict__` of an object, without asking the object."""
    getter: Any = threading.local if isinstance(what, threading.local) else object
    try:
        found = getter.__getattribute__(what, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def takes_attributes(what: Any) -> bool:
    """Whether an object has a `__dict__`, so that anything can be set on it."""
    return any("__dict__" in vars(cls) for cls in type(what).__mro__)


def slots_of(kind: type) -> list[str]:
    """The names of a class's `__slots__`."""
    members = [vars(cls).items() for cls in kind.__mro__]
    return [name for own in members for name, value in own if isinstance(value, MemberDescriptorType)]


def _slot_values(what: Any) -> dict[str, Any]:
    found = {name: getattr(type(what), name).__get__(what) for name in slots_of(type(what)) if is_set(what, name)}
    return {name: value for name, value in found.items() if value is not what}


def is_set(what: Any, name: str) -> bool:
    """Whether a slot of an object holds anything."""
    try:
        getattr(type(what), name).__get__(what)
    except AttributeError:
        return False
    return True


class Attributes(Kind):
    """What an object has in its `__dict__` and its `__slots__`."""

    selection = Selection.NAMES
    takes_values = True

    def __init__(self, *, without: frozenset[str] = frozenset()) -> None:
        self.without = without  # what something else looks after

    def read(self, what: Any) -> dict[Any, Any]:
        own = own_dict(what)
        kept = {name: value for name, value in own.items() if name not in self.without} if self.without else own
        return _slot_values(what) | kept

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        own = own_dict(what)
        for name, value in rewritten(self.read(what), before):
            if name in slots_of(type(what)):
                _set_slot(what, name, value)
            elif value is UNSET:
                own.pop(name, None)
            else:
                own[name] = value

    def put(self, what: Any, key: Any, value: Any) -> None:
        if key in slots_of(type(what)):
            _set_slot(what, key, value)
        else:
            own_dict(what)[key] = value

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        own = own_dict(what)
        slots = {name: value for name, value in values.items() if name not in own}
        found = named(own, {name: value for name, value in values.items() if name in own})
        return found + [(alone(attrgetter(name)), what, (value,)) for name, value in slots.items()]


@cache
def _of_fakes() -> frozenset[str]:
    """What torch itself keeps in the `__dict__` of a fake tensor."""
    return frozenset({*vars(FakeTensorMode().from_tensor(empty(0))), "_is_param"})


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What the user has set on a tensor, such as `p.frozen`."""
    own = own_dict(tensor)
    return {name: value for name, value in own.items() if name not in _of_fakes()} if own else {}


def give_attributes(tensor: Tensor, attributes: Mapping[str, Any]) -> None:
    """These, and no others, as what the user has set on a tensor."""
    own = own_dict(tensor)
    for name, value in rewritten(attributes_of(tensor), attributes):
        if value is UNSET:
            del own[name]
        else:
            own[name] = value


class OnTensor(Attributes):
    """What the user has set on a tensor."""

    def read(self, what: Any) -> dict[Any, Any]:
        return attributes_of(what)

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        give_attributes(what, before)


def _set_slot(what: Any, name: str, value: Any) -> None:
    member = getattr(type(what), name)
    if value is UNSET:
        member.__delete__(what)
    else:
        member.__set__(what, value)


class Members(Kind):
    """What a class gives its objects."""

    selection = Selection.NAMES
    takes_values = True

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(vars(what))

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        for name, value in rewritten(vars(what), before):
            if value is UNSET:
                type.__delattr__(what, name)
            else:
                type.__setattr__(what, name, value)

    def put(self, what: Any, key: Any, value: Any) -> None:
        type.__setattr__(what, key, value)

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return named(vars(what), values)


class Variables(Members):
    """The globals of a Python module, as attributes of it."""

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        _write_globals(vars(what), before)

    def put(self, what: Any, key: Any, value: Any) -> None:
        vars(what)[key] = value


def _write_globals(variables: dict[str, Any], before: Mapping[Any, Any]) -> None:
    for name, value in rewritten(variables, before):
        if value is not UNSET:
            variables[name] = value
        elif not name.startswith("__") and not isinstance(variables[name], (ModuleType, FunctionType, type)):
            del variables[name]  # not what was imported meanwhile, nor what Dynamo reads there


class Globals(Kind):
    """The globals of a Python module, as its functions read them."""

    selection = Selection.VARIABLES
    takes_values = True

    def __init__(self, *, suffix: str) -> None:
        self._suffix = suffix

    def read(self, what: Any) -> dict[Any, Any]:
        return {name: _bare(value) for name, value in what.items()}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        _write_globals(what, before)

    def put(self, what: Any, key: Any, value: Any) -> None:
        what[key] = value

    def label(self, path: str, key: Any) -> str:
        return f"the global {key}{self._suffix}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return named(what, values)


def _bare(value: Any) -> Any:
    """A function without what `torch.fx.wrap`, or a trace that takes calls, puts around it for the time of a trace."""
    is_wrapped = type(value) is FunctionType and value.__code__.co_filename in _WRAPPING
    return vars(value).get("__wrapped__", value) if is_wrapped else value
