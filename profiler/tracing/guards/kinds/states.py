"""What stands somewhere: events, loggers, context variables, generators of random numbers, iterators."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Mapping
from contextvars import ContextVar
from operator import length_hint
from types import GeneratorType
from typing import Any

import numpy as np

from profiler.tracing.guards.exact import UNSET
from profiler.tracing.guards.kinds.kind import CannotPutBackError, Kind, Probe, Selection, named
from profiler.tracing.guards.kinds.namespaces import own_dict


class Flag(Kind):
    """Whether an event of the standard library is set."""

    takes_values = True

    def read(self, what: Any) -> dict[Any, Any]:
        return {"_flag": own_dict(what)["_flag"]}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        own_dict(what)["_flag"] = before["_flag"]

    def label(self, path: str, key: Any) -> str:
        return f"{path}.is_set()"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return named(own_dict(what), values)


class Level(Kind):
    """From which level on a logger says something, where code asks for it."""

    selection = Selection.NAMES
    probed = False
    by_value = True

    def read(self, what: logging.Logger) -> dict[Any, Any]:
        heard = (what.getEffectiveLevel(), what.manager.disable, what.disabled)
        return {"level": what.level, "getEffectiveLevel": heard[0], "isEnabledFor": heard}

    def write(self, what: logging.Logger, before: Mapping[Any, Any]) -> None:
        what.setLevel(before["level"])


class Context(Kind):
    """The value of a context variable."""

    takes_values = True

    def read(self, what: ContextVar[Any]) -> dict[Any, Any]:
        return {"": what.get(UNSET)}

    def write(self, what: ContextVar[Any], before: Mapping[Any, Any]) -> None:
        if before[""] is not UNSET:  # else only its context can go, and each trial has one of its own
            what.set(before[""])

    def label(self, path: str, key: Any) -> str:
        return path

    def probes(self, what: ContextVar[Any], values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        return [(lambda var: (var.get(UNSET),), what, tuple(values.values()))]


class State(Kind):
    """Where a generator of random numbers or an iterator stands."""

    selection = Selection.DRAWN
    by_value = True

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": _state(what)}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        if isinstance(what, random.Random):
            what.setstate(before[""])
        elif isinstance(what, np.random.Generator):
            what.bit_generator.state = pickle.loads(before[""])
        elif isinstance(what, np.random.RandomState):
            what.set_state(pickle.loads(before[""]))
        elif isinstance(what, _SETTABLE):
            what.__setstate__(before[""][0])
        else:
            raise CannotPutBackError

    def label(self, path: str, key: Any) -> str:
        return f"the state of {path}"


# Iterators that can be told where to stand.
_SETTABLE: tuple[Any, ...] = tuple(type(iter(kind())) for kind in (list, tuple, str, bytes))


def has_state(what: Any) -> bool:
    """Whether an object is a generator of random numbers or an iterator whose position can be told."""
    return _state(what) is not None


def _state(what: Any) -> Any:
    if isinstance(what, random.Random):
        return what.getstate()
    if isinstance(what, np.random.Generator):
        return pickle.dumps(what.bit_generator.state)
    if isinstance(what, np.random.RandomState):
        return pickle.dumps(what.get_state(legacy=False))
    if isinstance(what, GeneratorType):
        frame = what.gi_frame
        return None if frame is None else (frame.f_lasti, tuple(map(id, frame.f_locals.values())))
    if isinstance(what, _SETTABLE):
        return what.__reduce__()[2:] or ("at its end",)
    if type(what).__name__ == "count":
        return repr(what)
    return (length_hint(what),) if hasattr(type(what), "__next__") and hasattr(type(what), "__length_hint__") else None
