"""One holder as it must stay: compared at every call in a few instructions, and told in sentences where it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from profiler.tracing.guards.exact import PLAIN, UNSET, exactly_equal, was_and_is
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.kinds import Attributes, Items, Probe, is_set, own_dict, slots_of


class Sameness:
    """Whether what lies somewhere now is, for the code that ran, what lay there before."""

    def __init__(self, holders: dict[int, list[Watch]]) -> None:
        self._holders = holders

    def __call__(self, then: Any, now: Any) -> bool:
        return self._same(then, now, frozenset())

    def _same(self, then: Any, now: Any, open_pairs: frozenset[tuple[int, int]]) -> bool:
        if then is now or exactly_equal(then, now) or _wrapped_since(then, now):
            return True
        pair = (id(then), id(now))
        if type(then) is not type(now) or isinstance(then, (Tensor, nn.Module, type, *PLAIN)) or pair in open_pairs:
            return pair in open_pairs
        inside = open_pairs | {pair}
        if isinstance(then, MethodType):
            return then.__func__ is now.__func__ and self._same(then.__self__, now.__self__, inside)
        if isinstance(then, FunctionType) and then.__code__ is not now.__code__:
            return False
        watches = self._holders.get(id(then), ())
        # Of whom nothing is read but which one it is (`mode is TRAINING`), another one is another.
        is_read = any(watch.kept or watch.sized for watch in watches)
        return is_read and all(self._same_inside(watch, now, inside) for watch in watches)

    def _same_inside(self, watch: Watch, now: Any, pairs: frozenset[tuple[int, int]]) -> bool:
        found = watch.holder.kind.read(now)
        if watch.sized and list(found) != list(watch.kept):
            return False
        return all(self._same(then, found.get(key, UNSET), pairs) for key, then in watch.kept.items())


def _wrapped_since(then: Any, now: Any) -> bool:
    """torch itself wraps the step of an optimizer's class when the first of its objects is made, and parts of all
    optimizers when something is compiled for the first time: nothing that a user did, and the same is computed."""
    if str(getattr(now, "__module__", "")).startswith("torch._dynamo."):  # it counts the modules that are made
        return callable(then)
    if getattr(now, "hooked", False) is True:
        return getattr(now, "__wrapped__", None) is then
    is_kept_from_dynamo = getattr(now, "_torchdynamo_disable", False) is True
    return is_kept_from_dynamo and getattr(now, "_torchdynamo_orig_callable", None) is then


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
        self.lineage = lineage_of(holder.what)

    @property
    def lacks(self) -> Callable[[frozenset[str]], bool]:
        """What tells whether none of some names are there now, of those that may turn up."""
        what = self.holder.what
        if isinstance(what, type):
            return vars(what).keys().isdisjoint
        if not isinstance(self.holder.kind, Attributes):
            return dict.keys(what).isdisjoint
        in_dict = dict.keys(own_dict(what)).isdisjoint
        slots = [] if isinstance(what, Tensor) else [name for name in slots_of(type(what)) if name in self.absent]
        return (lambda names: in_dict(names) and not any(is_set(what, name) for name in slots)) if slots else in_dict

    def untouched(self) -> bool:
        """Whether a glance shows that all is as it was; False says nothing."""
        if lineage_of(self.holder.what) is not self.lineage:
            return False
        if not self.holder.kind.probed or (self.sized and _size(self.holder.what) != len(self.kept)):
            return False
        try:
            as_before = all(all(map(is_, get(what), values)) for get, what, values in self.probes)
        except (KeyError, AttributeError):
            return False
        return as_before and (not self.absent or self.lacks(self.absent))

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
        if lineage_of(self.holder.what) is not self.lineage:
            yield f"{path} is of another class, or has other bases, than before"
        if self.sized and isinstance(self.holder.kind, Items) and _size(self.holder.what) != count:
            yield f"{path} had {count} entries and has {_size(self.holder.what)}"
            return
        found = list(self.differences(same))
        yield from (was_and_is(*one) for one in found)
        if self.sized and not found and [*self.holder.now()] != [*self.kept] and isinstance(self.holder.what, dict):
            yield f"the entries of {path} are in another order"


def lineage_of(what: Any) -> Any:
    """What decides where attributes of an object are looked up: its class, and of a class its bases."""
    return what.__mro__ if isinstance(what, type) else type(what)


_SIZED = (dict, list, tuple, set, frozenset)


def sizer(what: Any) -> Any:
    """The `len` of a container, not what its class makes of it."""
    return next((base for base in _SIZED if isinstance(what, base)), type(what)).__len__


def _size(what: Any) -> int:
    return int(sizer(what)(what))


def by_object(watches: Iterable[Watch]) -> dict[int, list[Watch]]:
    """Watches by the id of the object that they are of."""
    found: dict[int, list[Watch]] = {}
    for watch in watches:
        found.setdefault(id(watch.holder.what), []).append(watch)
    return found
