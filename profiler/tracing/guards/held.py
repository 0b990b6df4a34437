"""What a captured step holds on to of the user's Python: noted once, compared at every call in a few microseconds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import call, is_
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from profiler.tracing.guards.exact import UNSET, exactly_equal, was_and_is
from profiler.tracing.guards.holders import Attributes, Entries, Holder, Items, Probe, Selection, own_dict
from profiler.tracing.guards.reach import MOST_HOLDERS, Reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that the step itself changed while it was traced."""

    path: str
    then: Any
    now: Any
    read: bool  # False where it is only written, or read only to be written back

    def __str__(self) -> str:
        return was_and_is(self.path, self.then, self.now)


class Sameness:
    """Whether what lies somewhere now is, for the code that ran, what lay there before."""

    def __init__(self, holders: dict[int, list[Watch]]) -> None:
        self._holders = holders

    def __call__(self, then: Any, now: Any) -> bool:
        return self._same(then, now, frozenset())

    def _same(self, then: Any, now: Any, open_pairs: frozenset[tuple[int, int]]) -> bool:
        if then is now or exactly_equal(then, now) or _hooked_since(then, now):
            return True
        pair = (id(then), id(now))
        if type(then) is not type(now) or isinstance(then, (Tensor, nn.Module, type)) or pair in open_pairs:
            return pair in open_pairs
        inside = open_pairs | {pair}
        if isinstance(then, MethodType):
            return then.__func__ is now.__func__ and self._same(then.__self__, now.__self__, inside)
        if isinstance(then, FunctionType) and then.__code__ is not now.__code__:
            return False
        watches = self._holders.get(id(then), ())
        return bool(watches) and all(self._same_inside(watch, now, inside) for watch in watches)

    def _same_inside(self, watch: Watch, now: Any, pairs: frozenset[tuple[int, int]]) -> bool:
        found = watch.holder.kind.read(now)
        if watch.sized and list(found) != list(watch.kept):
            return False
        return all(self._same(then, found.get(key, UNSET), pairs) for key, then in watch.kept.items())


def _hooked_since(then: Any, now: Any) -> bool:
    """torch wraps the step of an optimizer's class when the first of its objects is made: nothing that a user did."""
    return getattr(now, "hooked", False) is True and getattr(now, "__wrapped__", None) is then


class Watch:
    """One holder, and those of its values that the step read and did not change."""

    def __init__(
        self, holder: Holder, kept: dict[Any, Any], absent: frozenset[str] = frozenset(), *, sized: bool = True
    ) -> None:
        self.holder = holder
        self.kept = kept
        self.absent = absent  # names that must not turn up
        may_grow = holder.partial or (holder.lenient and isinstance(holder.what, (dict, set)))
        self.sized = sized and holder.kind.sized and not may_grow and len(kept) == len(holder.before)
        probes = holder.kind.probes(holder.what, kept, sized=self.sized) if holder.kind.probed else []
        self.probes: list[Probe] = probes

    @property
    def table(self) -> dict[str, Any]:
        """Where names may turn up."""
        return own_dict(self.holder.what) if isinstance(self.holder.kind, Attributes) else self.holder.what

    def untouched(self) -> bool:
        """Whether a glance shows that all is as it was; False says nothing."""
        if not self.holder.kind.probed or (self.sized and _size(self.holder.what) != len(self.kept)):
            return False
        try:
            as_before = all(all(map(is_, get(what), values)) for get, what, values in self.probes)
        except (KeyError, AttributeError):
            return False
        return as_before and (not self.absent or dict.keys(self.table).isdisjoint(self.absent))

    def differences(self, same: Sameness) -> Iterator[tuple[str, Any, Any]]:
        """What is not as it was: what to call it, what it was, what it is."""
        now, label = self.holder.now(), self.holder.label
        keys = dict.fromkeys((*self.kept, *(now if self.sized else sorted(self.absent, key=str))))
        for key in keys:
            then, found = self.kept.get(key, UNSET), now.get(key, UNSET)
            if not same(then, found):
                yield label(key), then, found

    def mismatches(self, same: Sameness) -> Iterator[str]:
        """The same in sentences."""
        path, count = self.holder.path, len(self.kept)
        if self.sized and isinstance(self.holder.kind, Items) and _size(self.holder.what) != count:
            yield f"{path} had {count} entries and has {_size(self.holder.what)}"
            return
        found = list(self.differences(same))
        yield from (was_and_is(*one) for one in found)
        if self.sized and not found and [*self.holder.now()] != [*self.kept] and isinstance(self.holder.what, dict):
            yield f"the entries of {path} are in another order"


_SIZED = (dict, list, tuple, set, frozenset)


def _sizer(what: Any) -> Any:
    """The `len` of a container, not what its class makes of it."""
    return next((base for base in _SIZED if isinstance(what, base)), type(what)).__len__


def _size(what: Any) -> int:
    return int(_sizer(what)(what))


class Held:
    """All of the user's Python that a graph has baked in, within the bounds of `reach`."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.changes: tuple[Change, ...] = ()
        self._unsettled: set[tuple[int, Any]] = set()
        self._resized: set[int] = set()
        self._watches: list[Watch] = []
        self._same = Sameness({})

    # -- after the step has run -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Right after the step: what it changed itself is no reason to capture it again."""
        watches = [Watch(holder, self._selected(holder, counted=True)) for holder in self._early()]
        same = Sameness(_by_object(watches))
        self.changes = tuple(change for watch in watches for change in self._changes(watch, same))

    def _changes(self, watch: Watch, same: Sameness) -> Iterator[Change]:
        holder, now, kept = watch.holder, watch.holder.now(), watch.kept
        if watch.sized and list(now) != list(kept):
            yield Change(path=f"the number of entries of {holder.path}", then=len(kept), now=len(now), read=bool(kept))
            self._resized.add(id(holder))
        keys = () if id(holder) in self._resized and not isinstance(holder.kind, Entries) else kept
        for key in keys:
            found = now.get(key, UNSET)
            if not same(kept[key], found):
                self._unsettled.add((id(holder), key))
                read = self._reach.reads(holder, key)
                yield Change(path=holder.label(key), then=kept[key], now=found, read=read)

    def _early(self) -> Iterator[Holder]:
        return (holder for holder in self._reach.all_holders() if not holder.late and self._reach.ran(holder))

    def _selected(self, holder: Holder, *, counted: bool = False) -> dict[Any, Any]:
        reach = self._reach
        return {
            key: value
            for key, value in holder.before.items()
            if reach.reads(holder, key) or (counted and reach.counts(key))
        }

    def close(self) -> None:
        """Once everything is as before: the list of what each call looks at."""
        reach = self._reach
        _say_what_is_not_watched(reach)
        for holder in reach.all_holders():
            if holder.late and not holder.partial:
                holder.before = holder.now()
        watches = [
            self._watch(h) for h in reach.all_holders() if reach.ran(h) and h.kind.selection is not Selection.DRAWN
        ]
        self._watches = [watch for watch in watches if watch.kept or watch.absent or watch.sized]
        self._same = Sameness(_by_object(watches))
        self._prepare_glance()

    def _watch(self, holder: Holder) -> Watch:
        resized = id(holder) in self._resized
        if holder.kind.selection is Selection.DRAWN or (resized and not isinstance(holder.kind, Entries)):
            return Watch(holder, {}, sized=False)
        kept = {
            key: value
            for key, value in self._selected(holder).items()
            if (id(holder), key) not in self._unsettled and not isinstance(value, FakeTensor)
        }
        absent = {name for name in self._reach.may_appear(holder) if (id(holder), name) not in self._unsettled}
        return Watch(holder, kept, frozenset(absent), sized=not resized)

    # -- at every call --------------------------------------------------------------------------------------

    def _prepare_glance(self) -> None:
        probed = [watch for watch in self._watches if watch.holder.kind.probed]
        probes = [probe for watch in probed for probe in watch.probes]
        self._getters = [probe[0] for probe in probes]
        self._targets = [probe[1] for probe in probes]
        self._expected = [value for probe in probes for value in probe[2]]
        sized = [watch for watch in probed if watch.sized]
        self._containers = [watch.holder.what for watch in sized]
        self._sizers = [_sizer(what) for what in self._containers]
        self._sizes = [len(watch.kept) for watch in sized]
        hiding = [watch for watch in probed if watch.absent]
        self._disjoint = [dict.keys(watch.table).isdisjoint for watch in hiding]
        self._absent = [tuple(watch.absent) for watch in hiding]
        self._contents = [watch for watch in self._watches if not watch.holder.kind.probed]

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            if list(map(call, self._sizers, self._containers)) != self._sizes:
                return False
            values = chain.from_iterable(map(call, self._getters, self._targets))
            if not all(map(is_, values, self._expected)):
                return False
        except (KeyError, AttributeError):
            return False
        return all(map(call, self._disjoint, self._absent)) and not any(
            any(watch.differences(self._same)) for watch in self._contents
        )

    def mismatches(self) -> Iterator[str]:
        """What is not as it was, one sentence each."""
        for watch in self._watches:
            if not watch.untouched():
                yield from watch.mismatches(self._same)

    def tensors(self, *, without: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """Tensors outside the model that the step can reach, with their paths."""
        known = {id(tensor) for tensor in without}
        found = [(path, tensor) for path, tensor in self._reach.tensors.values() if id(tensor) not in known]
        return [(path, tensor) for path, tensor in found if not isinstance(tensor, FakeTensor)]

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Every module that the step can reach, the model's first, with their paths."""
        return list(self._reach.modules.values())


def _say_what_is_not_watched(reach: Reach) -> None:
    for holder in reach.unwatched():
        size = holder.what.size if isinstance(holder.what, np.ndarray) else len(holder.what)
        _warn(f"{holder.path} has {size} entries, more than are watched")
    if reach.beyond:
        _warn(
            f"the step can reach more than {MOST_HOLDERS} objects, and {reach.beyond} is not watched, nor what follows"
        )


def _warn(what: str) -> None:
    warnings.warn(f"{what}: the planned step will not notice when it changes", UserWarning, stacklevel=2)


def _by_object(watches: Iterable[Watch]) -> dict[int, list[Watch]]:
    found: dict[int, list[Watch]] = {}
    for watch in watches:
        found.setdefault(id(watch.holder.what), []).append(watch)
    return found
