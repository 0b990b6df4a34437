"""What holds values without names: dicts, lists, sets and their kin."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

from profiler.tracing.guards.exact import shown
from profiler.tracing.guards.kinds.kind import Kind, Probe, Selection, alone, named


class Entries(Kind):
    """What a dict holds."""

    selection = Selection.KEYS
    sized = True
    takes_values = True

    def read(self, what: Any) -> dict[Any, Any]:
        base = _dict_base(what)
        return dict(zip(base.keys(what), base.values(what), strict=True))

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        base: Any = _dict_base(what)
        base.clear(what)
        for key, value in before.items():
            base.__setitem__(what, key, value)

    def put(self, what: Any, key: Any, value: Any) -> None:
        _dict_base(what).__setitem__(what, key, value)

    def label(self, path: str, key: Any) -> str:
        return f"{path}[{shown(key)}]"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        base = _dict_base(what)
        if not sized:
            return named(what if type(what) is base else _Raw(what), values)
        return [(base.__iter__, what, tuple(values)), (base.values, what, tuple(values.values()))]


class Factory(Kind):
    """What a dict makes for a key that it does not have."""

    def read(self, what: Any) -> dict[Any, Any]:
        return {"default_factory": what.default_factory}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        what.default_factory = before["default_factory"]

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return [(alone(attrgetter("default_factory")), what, tuple(values.values()))]


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
        return f"{path}[{shown(key)}]"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return named(what, values)


class Items(Kind):
    """What a list, tuple or deque holds."""

    selection = Selection.KEYS
    sized = True
    takes_values = True

    def read(self, what: Any) -> dict[Any, Any]:
        return dict(enumerate(_iterator_of(what)(what)))

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        if isinstance(what, list):
            list.__setitem__(what, slice(None), list(before.values()))
        elif isinstance(what, deque):
            deque.clear(what)
            deque.extend(what, before.values())

    def put(self, what: Any, key: Any, value: Any) -> None:
        base = list if isinstance(what, list) else deque
        base.__setitem__(what, key, value)

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

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        if not isinstance(what, set):
            return
        held = {id(value) for value in before.values()}
        for value in [value for value in set.__iter__(what) if id(value) not in held]:
            set.discard(what, value)
        set.update(what, before.values())

    def label(self, path: str, key: Any) -> str:
        return f"the element {key[1]!r} of {path}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return [(iter, what, tuple(values.values()))] if sized and isinstance(what, set) else []
