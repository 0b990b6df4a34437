"""What a step left for the next one of what it computed, as things that show whether that one reads them.

A step that writes such a value before it reads it hands nothing on. Stale things lie where a trace left its stand-ins
while the step is traced once more: tensors of the same kind, which the trace knows again where they are used, and for
numbers objects that cannot be used at all. What the step made around them (a list, an object) is made again around the
stale ones. Nothing is asked of the step's code here: whatever it left anywhere lies there again.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from profiler.tracing.guards.exact import UNSET, Gone, was_and_is
from profiler.tracing.guards.holders import STAND_INS, Holder, is_of_the_trace, stand_ins_in
from profiler.tracing.guards.kinds import Attributes
from profiler.tracing.guards.stale_things import StaleThing, stale_tensor


class Stale:
    """The stale things of one trace, and where they lie.

    `kept` are objects that somebody else puts back, by their ids; `constants` stand-ins that hold the same in every
    step.
    """

    def __init__(self, *, kept: Collection[int] = (), constants: Collection[int] = ()) -> None:
        self._kept = kept
        self._constants = constants
        self._made: dict[int, tuple[Any, Any]] = {}  # by what they stand for, which is kept alive beside them
        self._places: list[tuple[Any, str]] = []

    def contents_of(self, holder: Holder, *, with_constants: bool = False) -> dict[Any, Any]:
        """What a holder has now, with stale things in the place of stand-ins.

        In the place of constants there is what was there before, as if they were made anew; `with_constants` has stale
        things there, too.
        """
        contents: dict[Any, Any] = {}
        now = holder.now()
        moves = _moves(holder, now) and any(map(is_of_the_trace, now.values()))
        for key, value in now.items():
            if is_of_the_trace(value) and not with_constants and self._is_constant(value):
                if key in holder.before:
                    contents[key] = holder.before[key]
                continue
            sentence = was_and_is(holder.label(key), holder.before.get(key, UNSET), Gone(value))
            if moves and isinstance(value, Tensor) and not isinstance(value, STAND_INS):
                contents[key] = self._stale(value, sentence)  # a later step reads there what this one computed
            else:
                contents[self._of(key, sentence)] = self._of(value, sentence)
        return contents

    def _is_constant(self, value: Any) -> bool:
        return all(id(one) in self._constants for one in stand_ins_in([value]))

    def _of(self, value: Any, sentence: str) -> Any:
        if not is_of_the_trace(value):
            return value
        return self._rebuilt(value, lambda one: self._stale(one, sentence), {})

    def _stale(self, stand_in: Any, sentence: str) -> Any:
        if id(stand_in) not in self._made:
            made = stale_tensor(stand_in) if isinstance(stand_in, Tensor) else StaleThing()
            self._made[id(stand_in)] = (stand_in, made)
        made = self._made[id(stand_in)][1]
        self._places.append((made, sentence))
        return made

    def _rebuilt(self, value: Any, make: Callable[[Any], Any], done: dict[int, Any]) -> Any:
        """The same around what `make` makes of each stand-in in it."""
        if isinstance(value, STAND_INS):
            return make(value)
        if isinstance(value, weakref.ref) and is_of_the_trace(value):
            return make(value)  # what it points to goes with the trace
        if id(value) in done or id(value) in self._kept or not is_of_the_trace(value):
            return done.get(id(value), value)

        def inner(one: Any) -> Any:
            return self._rebuilt(one, make, done)

        if isinstance(value, (tuple, frozenset)):
            base: Any = tuple if isinstance(value, tuple) else frozenset
            return base.__new__(type(value), [inner(one) for one in value])
        return _copied(value, inner, done)

    def release(self) -> None:
        """Forget the stand-ins, which must not outlive their trace; what was made of them lies ready."""
        self._made = {key: (None, made) for key, (_, made) in self._made.items()}

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return not self._places

    @property
    def sentences(self) -> list[str]:
        """What lies where, one sentence each."""
        return list(dict.fromkeys(sentence for _, sentence in self._places))

    def read_of(self, tensors: Iterable[Tensor]) -> list[str]:
        """The sentences on those things that are among these tensors, or that were tried to be used."""
        used = {id(tensor) for tensor in tensors}
        return list(
            dict.fromkeys(
                sentence
                for made, sentence in self._places
                if (made.is_read if isinstance(made, StaleThing) else id(made) in used)
            )
        )


def _moves(holder: Holder, now: Mapping[Any, Any]) -> bool:
    """Whether a step moves the entries of a sequence on, so that what it puts in at one place is read at another."""
    if isinstance(holder.what, deque):
        return True
    tensors = {id(value): key for key, value in holder.before.items() if isinstance(value, Tensor)}
    return isinstance(holder.what, list) and any(tensors.get(id(value), key) != key for key, value in now.items())


def _copied(value: Any, inner: Callable[[Any], Any], done: dict[int, Any]) -> Any:
    """An object like this one, whose attributes are made of the other's; one that cannot be used where that fails."""
    kind: Any = type(value)
    base: Any = next((base for base in _FILLED if isinstance(value, base)), object)
    try:
        copy = base.__new__(kind)
    except TypeError:
        return StaleThing()
    done[id(value)] = copy
    if isinstance(value, dict):
        base.update(copy, {inner(key): inner(one) for key, one in base.items(value)})
    elif base is not object:
        more = (value.maxlen,) if isinstance(value, deque) else ()
        base.__init__(copy, [inner(one) for one in base.__iter__(value)], *more)
    if isinstance(value, defaultdict):
        copy.default_factory = value.default_factory
    attributes = Attributes()
    attributes.write(copy, {name: inner(one) for name, one in attributes.read(value).items()})
    return copy


# Containers that are made empty and filled, below what a class of the user's makes of them.
_FILLED = (OrderedDict, defaultdict, dict, list, set, deque)
