"""What a captured step holds on to of the user's Python: noted once, compared at every call in a few microseconds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import call, is_
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from profiler.tracing.guards.changes import Change, Weight
from profiler.tracing.guards.exact import PLAIN, UNSET, Gone, exactly_equal
from profiler.tracing.guards.holders import Holder, is_of_the_trace, plain_parts, stand_ins_in
from profiler.tracing.guards.kinds import Entries, Selection
from profiler.tracing.guards.left_behind import Left
from profiler.tracing.guards.object_walk import MOST_HOLDERS
from profiler.tracing.guards.putting_back import PuttingBack
from profiler.tracing.guards.reach import Reach
from profiler.tracing.guards.territory import is_own
from profiler.tracing.guards.watches import Sameness, Watch, by_object, lineage_of, sizer


class Held:
    """All of the user's Python that a graph has baked in, within the bounds of `reach`."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.changes: tuple[Change, ...] = ()
        self._unsettled: set[tuple[int, Any]] = set()
        self._resized: set[int] = set()
        self._absent_names: dict[frozenset[str], frozenset[str]] = {}
        self._watches: list[Watch] = []
        self._same = Sameness({})

    # -- after the step has run -----------------------------------------------------------------------------

    def settle(self, is_computed: Callable[[Any], bool]) -> None:
        """Right after the step: what it changed itself is no reason to capture it again.

        `is_computed` says of a value whether the step worked it out of what it was given.
        """
        watches = [Watch(holder, self._changeable(holder)) for holder in self._early()]
        same = Sameness(by_object(watches))
        self._is_computed = is_computed
        self.changes = tuple(change for watch in watches for change in self._changes(watch, same))
        left = [value for change in self.changes for value in _left_by(change)]
        self._reach.trials.constants = {
            id(one) for one in stand_ins_in(left) if isinstance(one, Tensor) and not is_computed(one)
        }
        del self._is_computed  # it knows the stand-ins of the trace

    def _changes(self, watch: Watch, same: Sameness) -> Iterator[Change]:
        holder, now, kept = watch.holder, watch.holder.now(), watch.kept
        if watch.sized and list(now) != list(kept):
            resize = self._resize(watch, now)
            if not _must_stay_as_before(resize):
                self._resized.add(id(holder))
            yield resize
        keys = (
            () if id(holder) in self._resized and not isinstance(holder.kind, Entries) else (*kept, *self._new(watch))
        )
        for key in keys:
            then, found = kept.get(key, UNSET), now.get(key, UNSET)
            if not same(then, found):
                read = self._reach.readable.reads(holder, key)
                weight = self._weight(holder, then, found, read=read)
                left = Gone(found) if is_of_the_trace(found) else found
                change = Change(
                    path=holder.label(key),
                    then=then,
                    now=left,
                    read=read,
                    weight=weight,
                    holder=holder,
                    key=key,
                    by_user=self._reach.readable.is_users_own(key),
                )
                if not _must_stay_as_before(change):
                    self._unsettled.add((id(holder), key))
                yield change

    def written(self) -> Iterator[tuple[Holder, Any, Any]]:
        """What the step put where: a holder, a key, the value."""
        for change in self.changes:
            yield from self._written_by(change)

    def _written_by(self, change: Change) -> Iterator[tuple[Holder, Any, Any]]:
        """What lies in places of its own since a change, where another call can put something, too."""
        holder, now = change.holder, change.holder.now()
        if holder.lenient or not holder.kind.takes_values:
            return
        new = [key for key in now if key not in holder.before]
        only_more = isinstance(holder.kind, Entries) and [*holder.before, *new] == [*now]  # none went, nor moved
        if change.key is None and not only_more:
            return
        keys = new if change.key is None else [change.key]
        yield from ((holder, key, now[key]) for key in keys if key in now and now[key] is not UNSET)

    def _new(self, watch: Watch) -> list[str]:
        """Attributes and variables that are there only since the step ran."""
        holder = watch.holder
        if holder.kind.selection not in (Selection.NAMES, Selection.VARIABLES):
            return []
        new = {name: value for name, value in holder.now().items() if name not in holder.before}
        return [name for name, value in new.items() if not (name.startswith("__") or isinstance(value, ModuleType))]

    def _resize(self, watch: Watch, now: dict[Any, Any]) -> Change:
        holder, kept = watch.holder, watch.kept
        read = self._reach.readable.looks_into(holder)
        new = [value for key, value in now.items() if key not in kept]
        weights = [self._weight(holder, UNSET, value, read=read) for value in new]
        heaviest = next((one for one in (Weight.CARRIED, Weight.DECIDES, Weight.REMADE) if one in weights), Weight.LOST)
        path = f"the number of entries of {holder.path}"
        return Change(path=path, then=len(kept), now=len(now), read=read, weight=heaviest, holder=holder)

    def _weight(self, holder: Holder, then: Any, now: Any, *, read: bool) -> Weight:
        computed = self._is_computed(now)
        if isinstance(now, Tensor) and not computed and (isinstance(now, FakeTensor) or then is None or then is UNSET):
            return Weight.REMADE
        if not read:
            return Weight.LOST
        if computed:
            return Weight.CARRIED
        if holder.kind.selection is Selection.DRAWN or not exactly_equal(plain_parts(then), plain_parts(now)):
            return Weight.DECIDES
        return Weight.LOST

    def _early(self) -> Iterator[Holder]:
        theirs = (h for h in self._reach.all_holders() if not h.late and not is_own(type(h.what)))
        return (holder for holder in theirs if self._reach.readable.ran(holder))

    def _selected(self, holder: Holder, *, written: bool = False) -> dict[Any, Any]:
        reach = self._reach
        return {
            key: value
            for key, value in holder.before.items()
            if reach.readable.reads(holder, key) or (written and reach.readable.sets(key))
        }

    def _watched(self, holder: Holder) -> dict[Any, Any]:
        """What it may read, and what the user's code may set to what was there already: its trace shows no change."""
        sets, plain = self._reach.readable.users_code_sets, (*PLAIN, tuple)
        same = {
            key: value
            for key, value in holder.before.items()
            if issubclass(type(value), plain) and sets(holder, key)  # what asks a value for its class may run its code
        }
        return self._selected(holder) | same

    def _changeable(self, holder: Holder) -> dict[Any, Any]:
        """Those of its values of which it counts that the step changes them: also what is written and never read."""
        return self._selected(holder, written=True) if holder.lenient else dict(holder.before)

    def close(self) -> None:
        """Once everything is as before: the list of what each call looks at."""
        reach = self._reach
        _say_what_is_not_watched(reach)
        for holder in reach.all_holders():
            if holder.late and not holder.partial:
                holder.before = holder.now()
        self._watch_all()

    def _watch_all(self) -> None:
        reach = self._reach
        watches = [
            self._watch(h)
            for h in reach.all_holders()
            if reach.readable.ran(h) and h.kind.selection is not Selection.DRAWN
        ]
        self._watches = [watch for watch in watches if watch.kept or watch.absent or watch.sized]
        self._same = Sameness(by_object(watches))
        self._prepare_glance()

    def watch_also(self, once: Iterable[Change], *, without: Iterable[Left]) -> None:
        """What the step made at its first call and not again: whatever else is put there, it reads.

        But for what each call leaves where it lies.
        """
        for change in once:
            self._resized.discard(id(change.holder))
            self._unsettled.discard((id(change.holder), change.key))
        self._unsettled.update((id(left.holder), left.key) for left in without)
        self._watch_all()

    def _watch(self, holder: Holder) -> Watch:
        resized = id(holder) in self._resized
        if holder.kind.selection is Selection.DRAWN or (resized and not isinstance(holder.kind, Entries)):
            return Watch(holder, {}, sized=False)
        kept = {
            key: value
            for key, value in self._watched(holder).items()
            if (id(holder), key) not in self._unsettled and not isinstance(value, FakeTensor)
        }
        absent = {name for name in self._reach.readable.may_appear(holder) if (id(holder), name) not in self._unsettled}
        shared = self._absent_names.setdefault(frozenset(absent), frozenset(absent))  # the same of many tensors
        return Watch(holder, kept, shared, sized=not resized)

    # -- at every call --------------------------------------------------------------------------------------

    def _prepare_glance(self) -> None:
        probed = [watch for watch in self._watches if watch.holder.kind.probed]
        probes = [probe for watch in probed for probe in watch.probes]
        self._getters = [probe[0] for probe in probes]
        self._targets = [probe[1] for probe in probes]
        self._expected = [value for probe in probes for value in probe[2]]
        sized = [watch for watch in probed if watch.sized]
        self._containers = [watch.holder.what for watch in sized]
        self._sizers = [sizer(what) for what in self._containers]
        self._sizes = [len(watch.kept) for watch in sized]
        hiding = [watch for watch in probed if watch.absent]
        self._disjoint = [watch.lacks for watch in hiding]
        self._absent = [watch.absent for watch in hiding]
        lineages = [(watch.holder.what, watch.lineage) for watch in self._watches]
        self._classes = [(what, lineage) for what, lineage in lineages if isinstance(what, type)]
        others = [(what, lineage) for what, lineage in lineages if not isinstance(what, type)]
        self._objects, self._types = [what for what, _ in others], [lineage for _, lineage in others]
        self._contents = [watch for watch in self._watches if not watch.holder.kind.probed]

    def holds(self) -> bool:
        """Whether all is as it was."""
        try:
            if not all(map(is_, map(type, self._objects), self._types)):
                return False
            if any(lineage_of(what) is not lineage for what, lineage in self._classes):
                return False
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

    @property
    def trials(self) -> PuttingBack:
        """What the traced step left behind, laid out for another trace."""
        return self._reach.trials

    def tensors(self, *, without: Iterable[Tensor]) -> list[tuple[str, Tensor]]:
        """Tensors outside the model that the step can reach, with their paths."""
        known = {id(tensor) for tensor in without}
        found = [(path, tensor) for path, tensor in self._reach.found.tensors.values() if id(tensor) not in known]
        return [(path, tensor) for path, tensor in found if not isinstance(tensor, FakeTensor)]

    @property
    def names(self) -> frozenset[str]:
        """Names of attributes that the step's code reads of whatever it has."""
        return self._reach.readable.names

    @property
    def once(self) -> tuple[str, ...]:
        """What the step does while it is traced and is another at each step: the clock, files, iterators."""
        return tuple(self._reach.found.once)

    def modules(self) -> list[tuple[str, nn.Module]]:
        """Every module that the step can reach, the model's first, with their paths."""
        return list(self._reach.found.modules.values())


def _must_stay_as_before(change: Change) -> bool:
    """Whether the step found nothing there, such as an empty cache, and put in what decides: then that is watched."""
    found_nothing = change.key is None or change.then is UNSET or change.then is None
    return found_nothing and change.weight is Weight.DECIDES and not change.is_a_librarys


def _left_by(change: Change) -> list[Any]:
    """What a step left where it changed something."""
    now = change.holder.now()
    return list(now.values()) if change.key is None else [now.get(change.key)]


def _say_what_is_not_watched(reach: Reach) -> None:
    for holder in reach.found.unwatched():
        _warn(f"{holder.path} {_why_unwatched(holder.what)}")
    for said in reach.found.unseen:
        _warn(said)
    for path, what in reach.found.only_weakly():
        warnings.warn(
            f"the step comes to {path}, a {type(what).__name__}, by a weak reference alone: the planned step keeps it "
            "alive, so that it will not be gone when you let go of it. Pass what depends on it in the batch",
            UserWarning,
            stacklevel=2,
        )
    if reach.found.beyond:
        _warn(
            f"the step can reach more than {MOST_HOLDERS} objects, and {reach.found.beyond} is not watched, nor what "
            "follows"
        )


def _why_unwatched(what: Any) -> str:
    if isinstance(what, np.ndarray) and what.dtype.hasobject and what.dtype != object:
        return "is a numpy array with fields of objects, which is not looked into"
    if isinstance(what, np.ndarray):
        return f"has {what.size} entries, more than are watched"
    if hasattr(type(what), "__len__"):
        return f"has {len(what)} entries, more than are watched"
    return f"is a {type(what).__name__} of more bytes than are watched"


def _warn(what: str) -> None:
    warnings.warn(f"{what}: the planned step will not notice when it changes", UserWarning, stacklevel=2)
