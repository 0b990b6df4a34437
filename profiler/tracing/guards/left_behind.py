"""What a step leaves in the user's objects for whoever looks there after it: each planned call puts it there again.

Two traces tell what a place gets at each call, and what only at the first (a mask that is made where there is none).
The latter is put there as long as the place is as it was found; anything else than that, or than what was put, is no
longer the captured step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.tracing.guards.exact import PLAIN, UNSET, exactly_equal, was_and_is
from profiler.tracing.guards.holders import Holder

Place = tuple[int, type, Any]  # an object by its id, in what way it holds values, and under which key


def place_of(holder: Holder, key: Any) -> Place:
    """What tells a place from all others, also in another trace."""
    return id(holder.what), type(holder.kind), key


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Left:
    """What one place holds after the step: leaves of a tree, of which graph outputs fill those that are `computed`."""

    holder: Holder
    key: Any
    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    computed: Mapping[int, str]  # by the leaf, what two traces of it have in common

    @property
    def path(self) -> str:
        """What a sentence calls the place."""
        return self.holder.label(self.key)

    @property
    def place(self) -> Place:
        return place_of(self.holder, self.key)

    @property
    def is_made_anew(self) -> bool:
        """Whether nothing in it is an object of the user's, so that it may be put there at another time, too."""
        rest = (leaf for i, leaf in enumerate(self.leaves) if i not in self.computed)
        return all(isinstance(leaf, PLAIN) for leaf in rest)

    def is_like(self, other: Left) -> bool:
        """Whether another trace has left the same there."""
        if self.tree != other.tree or self.computed != other.computed:
            return False
        pairs = zip(self.leaves, other.leaves, strict=True)
        return all(a is b or exactly_equal(a, b) for a, b in pairs)

    def now(self) -> Any:
        """What lies there now; UNSET where nothing does."""
        return self.holder.now().get(self.key, UNSET)

    def put(self, value: Any) -> None:
        """Something into the place."""
        self.holder.kind.put(self.holder.what, self.key, value)

    def filled(self, outputs: Mapping[int, Any]) -> Any:
        """The value with these in the place of what is computed."""
        return pytree.tree_unflatten([outputs.get(i, leaf) for i, leaf in enumerate(self.leaves)], self.tree)


class LeftBehind:
    """All that a captured step leaves in objects, where a call can put it; a guard of what it puts there once."""

    def __init__(self, found: Sequence[Left] = ()) -> None:
        self.found = tuple(found)
        self._each: dict[int, Left] = {}  # by its position among those that were found
        self._once: dict[int, Left] = {}
        self._put: dict[int, _Put] = {}

    # -- told by more traces ----------------------------------------------------------------------------------

    def settle(self, again: LeftBehind, later: LeftBehind) -> None:
        """By what the next trace left, and one that found there, too, what the first had made of constants."""
        second = {left.place: left for left in again.found}
        still = {left.place for left in later.found}
        for i, left in enumerate(self.found):
            other = second.get(left.place)
            if (other is None or left.place not in still) and left.is_made_anew:
                self._once[i] = left
            elif other is not None and left.is_like(other):
                self._each[i] = left

    @property
    def live(self) -> dict[Place, Left]:
        """What each call leaves as the user's step would."""
        return {left.place: left for left in (*self._each.values(), *self._once.values())}

    # -- at every call ----------------------------------------------------------------------------------------

    def put(self, outputs: Mapping[int, Mapping[int, Any]]) -> None:
        """Leave what a call has computed, by the position of what was found, and its leaf."""
        for i, left in self._each.items():
            left.put(left.filled(outputs.get(i, {})))
        for i, left in self._once.items():
            if _is_same(left.holder.before.get(left.key, UNSET), left.now()):
                left.put(left.filled(outputs.get(i, {})))
                self._put[i] = _Put.of(left.now())

    def holds(self) -> bool:
        """Whether what is put once is as it was found, or as it was put."""
        return not self._once or next(self.mismatches(), None) is None

    def mismatches(self) -> Iterator[str]:
        """What lies in their places otherwise, one sentence each."""
        for i, left in self._once.items():
            before, now = left.holder.before.get(left.key, UNSET), left.now()
            if not _is_same(before, now) and not (i in self._put and self._put[i].is_still(now)):
                yield was_and_is(left.path, before, now)

    # -- in trials --------------------------------------------------------------------------------------------

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever is put inside: afterwards the places are as before."""
        put, holders = dict(self._put), {id(left.holder): left.holder for left in self.live.values()}
        contents = [(holder, holder.now()) for holder in holders.values()]
        try:
            yield
        finally:
            self._put = put
            for holder, before in contents:
                holder.kind.write(holder.what, before)

    def values(self) -> Iterator[tuple[str, Any]]:
        """What lies in the places now, leaf by leaf, and what to call it."""
        for left in self.live.values():
            for i, leaf in enumerate(pytree.tree_leaves(left.now())):
                yield f"value {i} of {left.path}" if i else left.path, leaf


@dataclass(frozen=True, kw_only=True, slots=True)
class _Put:
    """What was put into a place, and how often its tensors had been written to by then."""

    value: Any
    versions: tuple[int, ...]

    @staticmethod
    def of(value: Any) -> _Put:
        return _Put(value=value, versions=_versions(value))

    def is_still(self, now: Any) -> bool:
        return _is_same(self.value, now) and _versions(now) == self.versions


def _versions(value: Any) -> tuple[int, ...]:
    tensors: Iterable[Any] = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


def _is_same(then: Any, now: Any) -> bool:
    return then is now or exactly_equal(then, now)
