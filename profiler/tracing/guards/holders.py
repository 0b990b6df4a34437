"""One object that a step can reach, and what it held before the step ran."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from profiler.tracing.eager_ways.live_numbers import LIVE
from profiler.tracing.guards.exact import PLAIN, UNSET, is_plain
from profiler.tracing.guards.kinds import Attributes, Elements, Items, Kind
from profiler.tracing.guards.stale_things import is_stale

# What stands for tensors and for numbers read from them while a step is traced.
STAND_INS = (FakeTensor, *LIVE)


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

    def is_as_before(self, now: dict[Any, Any] | None = None) -> bool:
        """Whether it holds, or these are, the very objects that it held, in their order."""
        now, before = self.now() if now is None else now, self.before
        if len(now) != len(before):
            return False
        if self.kind.by_value:
            return bool(now == before)
        keys = () if isinstance(self.kind, (Items, Elements)) else zip(now, before, strict=True)
        return all(map(is_, now.values(), before.values())) and all(_same_key(*pair) for pair in keys)

    def put_back(self) -> None:
        """Give it what it held; CannotPutBackError where it takes nothing back."""
        if any(isinstance(value, STAND_INS) for value in self.before.values()):  # found when the trace had begun
            self.before = without_stand_ins(self)
        self.kind.write(self.what, self.before)

    def put_back_stand_ins(self) -> None:
        """The same where stand-ins of a trace lie in it, and nothing else of what it has now is touched."""
        if any(map(is_of_the_trace, self.now().values())):
            self.kind.write(self.what, without_stand_ins(self))


def _same_key(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and isinstance(then, (str, int)) and now == then)


def is_of_the_trace(value: Any, depth: int = 6) -> bool:
    """Whether a value is a stand-in, or a container or object in which there is one."""
    return next(stand_ins_in([value], depth), UNSET) is not UNSET


_WITHOUT = (type, ModuleType, FunctionType, Tensor, *PLAIN)  # what is not looked into


def _inner(value: Any) -> tuple[Any, ...]:
    if isinstance(value, weakref.ref):
        return (value(),)
    inner: tuple[Any, ...] = tuple(Attributes().read(value).values())
    if isinstance(value, dict):
        return (*inner, *dict.keys(value), *dict.values(value))
    return (*inner, *value) if isinstance(value, (list, tuple, set, frozenset, deque)) else inner


def stand_ins_in(values: Iterable[Any], depth: int = 6) -> Iterator[Any]:
    """Every stand-in among these values and inside them; each object is looked into once, however many hold it."""
    seen: dict[int, Any] = {}
    level = list(values)
    for below in range(depth, -1, -1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, STAND_INS):
                yield value
            elif below and id(value) not in seen and not isinstance(value, _WITHOUT):
                seen[id(value)] = value
                inner.extend(_inner(value))
        level = inner


def plain_parts(value: Any, depth: int = 6) -> Any:
    """What of a value can be told apart without asking it: plain values inside it, in their order."""
    if isinstance(value, STAND_INS) or is_stale(value):
        return STAND_INS  # computed: which of them it is does not tell
    if value is UNSET or is_plain(value) or isinstance(value, Tensor):
        return value
    if not depth or isinstance(value, _WITHOUT):
        return type(value)
    return type(value), tuple(plain_parts(one, depth - 1) for one in _inner(value))


def without_stand_ins(holder: Holder) -> dict[Any, Any]:
    """What a holder has now, with what it had before in the place of stand-ins of a trace."""
    now = holder.now()
    found = {key for key, value in now.items() if is_of_the_trace(value)}
    kept = {key: value for key, value in now.items() if key not in found}
    return kept | {key: holder.before[key] for key in found if key in holder.before}
