"""What every kind of holder offers: how it is read, written, named in a sentence, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from operator import itemgetter
from typing import Any, ClassVar

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


class CannotPutBackError(Exception):
    """What an object held before cannot be given back to it."""


class Kind:
    """How one kind of object holds values. `read` gives them by key; neither it nor `write` runs the user's code."""

    selection: ClassVar[Selection] = Selection.ALL
    sized: ClassVar[bool] = False  # whether one value more is a change, too
    probed: ClassVar[bool] = True  # whether probes tell; else what it holds is compared each time
    by_value: ClassVar[bool] = False  # whether what is read of it is made anew at each reading
    takes_values: ClassVar[bool] = False  # whether `put` gives it a value as assigning it would

    def read(self, what: Any) -> dict[Any, Any]:
        """What the object holds now."""
        raise NotImplementedError

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        """Give an object back what was once read of it; CannotPutBackError where it takes nothing back."""
        raise CannotPutBackError

    def put(self, what: Any, key: Any, value: Any) -> None:
        """Give an object one value; for the kinds that `takes_values`."""
        self.write(what, {**self.read(what), key: value})

    def label(self, path: str, key: Any) -> str:
        """What a sentence calls one of the values."""
        return f"{path}.{key}"

    def probes(self, what: Any, values: Mapping[Any, Any], *, sized: bool) -> list[Probe]:
        """What to call to see that these are still the object's values; `sized` says that they are all of them."""
        return []


def named(table: Any, values: Mapping[Any, Any]) -> list[Probe]:
    """A probe of several entries of one mapping."""
    if not values:
        return []
    keys = list(values)
    keys = keys * 2 if len(keys) == 1 else keys  # of one key an itemgetter gives no tuple
    return [(itemgetter(*keys), table, tuple(values[key] for key in keys))]


def alone(getter: Callable[[Any], Any]) -> Callable[[Any], Iterable[Any]]:
    """The getter of one value as one of several."""
    return lambda what: (getter(what),)


def rewritten(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The keys that have another value than before, and what they had; UNSET where there was nothing."""
    for key in (*before, *(key for key in now if key not in before)):
        then = before.get(key, UNSET)
        if now.get(key, UNSET) is not then:
            yield key, then
