"""A batch that notes which of its plain values a step looks at.

The containers around plain values are stood in for by ones that note each access. What they really hold in the place of
a plain value fails at any use, so that code which reaches around their methods is never taken for one that does not
look: the step is then traced with its own batch, and every value counts as read.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class Noted:
    """A batch as a step gets it, and the positions of the leaves that were looked at."""

    def __init__(self, batch: Any) -> None:
        self._read: set[int] = set()
        self._hidden: set[int] = set()
        self._leaves = 0
        self.batch = self._stand_in(batch)

    @property
    def unread(self) -> frozenset[int]:
        """The plain leaves that nobody looked at."""
        return frozenset(self._hidden - self._read)

    @property
    def is_another(self) -> bool:
        """Whether the batch is not the user's own, because there are plain values in it."""
        return bool(self._hidden)

    def _stand_in(self, value: Any) -> Any:
        """The value itself, or a container in its place that notes who looks at the plain values in it."""
        kind: Any = type(value)
        if kind not in _CLASSES and not _is_named_tuple(kind):
            self._leaves += len(pytree.tree_leaves(value))
            return value
        parts = value if isinstance(value, dict) else dict(enumerate(value))
        plain: dict[Any, tuple[int, Any]] = {}
        held = {key: self._part(key, part, plain) for key, part in parts.items()}
        if not plain and all(held[key] is part for key, part in parts.items()):
            return value
        made = _class_for(kind)(held) if isinstance(value, dict) else _class_for(kind)._holding(held.values())
        made._plain, made._note = plain, self._read.add
        return made

    def _part(self, key: Any, part: Any, plain: dict[Any, tuple[int, Any]]) -> Any:
        if isinstance(part, Tensor) or not pytree.tree_structure(part).is_leaf():
            return self._stand_in(part)
        plain[key] = (self._leaves, part)
        self._hidden.add(self._leaves)
        self._leaves += 1
        return _Hidden()


class _Hidden:
    """Lies where a plain value would, for those who do not ask the container."""

    def _fail(self, *args: Any) -> Any:
        raise TypeError("a plain value of the batch is read around the container that holds it")

    __repr__ = __str__ = __format__ = __bool__ = __eq__ = __ne__ = __hash__ = _fail


# -- containers that note ---------------------------------------------------------------------------------------


class _Noting:
    """What all of them do. `_plain` has position and value of each plain leaf that nobody has looked at."""

    _plain: dict[Any, tuple[int, Any]] = {}  # noqa: RUF012 - each object gets its own; one made by the step has none
    _note: Callable[[int], Any] = staticmethod(id)

    def _value(self, key: Any, held: Any) -> Any:
        if key not in self._plain:
            return held
        leaf, value = self._plain[key]
        self._note(leaf)
        return value

    def _values(self, *, unused: frozenset[int] = frozenset()) -> Iterator[Any]:
        """All values in their order; those in `unused` positions are handed out to nobody."""
        items = self.items_held()
        for i, (key, held) in enumerate(items):
            yield self._plain[key][1] if i in unused and key in self._plain else self._value(key, held)

    def items_held(self) -> list[tuple[Any, Any]]:
        """What lies in the container."""
        raise NotImplementedError


class _Dict(_Noting, dict[Any, Any]):
    def items_held(self) -> list[tuple[Any, Any]]:
        return list(dict.items(self))

    def __getitem__(self, key: Any) -> Any:
        return self._value(key, dict.__getitem__(self, key))

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`, noted."""
        return self._value(key, dict.get(self, key, default))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._plain.pop(key, None)
        dict.__setitem__(self, key, value)

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self)  # its own, so that `**batch` asks for the values one by one

    def _opened(self) -> Any:
        """Itself, with everything in it, all noted."""
        for key in list(self._plain):
            dict.__setitem__(self, key, self[key])
        self._plain.clear()
        return self


class _Sequence(_Noting):
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self._base(self._values())[key]
        held = self._base.__getitem__(self, key)
        position = key.__index__()
        return self._value(position + len(self) if position < 0 else position, held)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._values(unused=_unused(sys._getframe(1), len(self)))))  # type: ignore[arg-type]

    def items_held(self) -> list[tuple[Any, Any]]:
        return list(enumerate(self._base.__iter__(self)))

    def __radd__(self, other: Any) -> Any:
        return other + self._base(self._values())

    _base: Any


class _List(_Sequence, list[Any]):
    _base = list

    @classmethod
    def _holding(cls, held: Any) -> Any:
        return cls(held)

    def _opened(self) -> Any:
        for i, (_, value) in list(self._plain.items()):
            list.__setitem__(self, i, value)
            self._note(self._plain[i][0])
        self._plain.clear()
        return self


class _Tuple(_Sequence, tuple[Any, ...]):
    _base = tuple

    @classmethod
    def _holding(cls, held: Any) -> Any:
        return tuple.__new__(cls, held)

    def _opened(self) -> Any:
        return tuple(self._values())


# What tells nothing of the values, or is written out above.
_QUIET = frozenset({"__len__", "__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__"})
_QUIET |= {"__init_subclass__", "__subclasshook__", "__class_getitem__", "__sizeof__", "__dir__", "__doc__"}
_QUIET |= {"__dict__", "__weakref__", "__module__", "__getitem__", "__iter__", "__hash__", "__getstate__"}
_QUIET_IN_DICTS = frozenset({"keys", "get", "__contains__", "__reversed__", "__setitem__", "fromkeys"})


def _opening(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self._opened(), *args, **kwargs)

    return call


def _complete(cls: Any, base: type) -> None:
    """All other methods of the base, such that whoever calls one has looked at everything."""
    quiet = _QUIET | _QUIET_IN_DICTS if issubclass(base, dict) else _QUIET
    for name in dir(base):
        if name not in quiet and callable(getattr(base, name)):
            setattr(cls, name, _opening(getattr(base, name)))
    if base is tuple:
        cls.__hash__ = _opening(tuple.__hash__)


_CLASSES: dict[type, Any] = {dict: _Dict, list: _List, tuple: _Tuple}
for _base, _cls in _CLASSES.items():
    _complete(_cls, _base)


def _is_named_tuple(kind: type) -> bool:
    return pytree.is_namedtuple_class(kind) and kind.__mro__[1] is tuple


@functools.lru_cache(maxsize=64)
def _class_for(kind: Any) -> Any:
    """The class that stands in for containers of this one; of a named tuple it has the fields, too."""
    if kind in _CLASSES:
        return _CLASSES[kind]
    fields = {name: property(itemgetter(i)) for i, name in enumerate(kind._fields)}
    return type(kind.__name__, (_Tuple, kind), fields)


def _register(cls: Any, flat: Callable[[Any], tuple[list[Any], Any]], made: Callable[..., Any], key: Any) -> None:
    def with_keys(container: Any) -> tuple[list[tuple[Any, Any]], Any]:
        values, context = flat(container)
        return [(key(k), value) for k, value in zip(context, values, strict=True)], context

    pytree.register_pytree_node(cls, flat, made, flatten_with_keys_fn=with_keys)


def _flat_dict(container: Any) -> tuple[list[Any], Any]:
    return list(container.values()), list(container)


def _flat_sequence(container: Any) -> tuple[list[Any], Any]:
    return list(container), list(range(len(container)))


def _made_dict(values: Any, keys: Any) -> Any:
    return dict(zip(keys, values, strict=True))


_register(_Dict, _flat_dict, _made_dict, pytree.MappingKey)
_register(_List, _flat_sequence, lambda values, _: list(values), pytree.SequenceKey)
_register(_Tuple, _flat_sequence, lambda values, _: tuple(values), pytree.SequenceKey)


# -- `images, labels, path = batch` where `path` is never used -----------------------------------------------------


def _unused(frame: FrameType | None, count: int) -> frozenset[int]:
    """Which of the `count` values that are being unpacked go to variables that nobody ever loads."""
    if frame is None:
        return frozenset()
    steps, at = _steps(frame.f_code)
    i = at.get(frame.f_lasti)
    if i is None or steps[i].opname != "UNPACK_SEQUENCE" or steps[i].arg != count:
        return frozenset()
    loaded = _loaded(frame.f_code)
    names, _ = _targets(steps, i)
    return frozenset(k for k, name in enumerate(names) if name is not None and name not in loaded)


@functools.lru_cache(maxsize=256)
def _steps(code: CodeType) -> tuple[list[dis.Instruction], Mapping[int, int]]:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    return steps, {step.offset: i for i, step in enumerate(steps)}


@functools.lru_cache(maxsize=256)
def _loaded(code: CodeType) -> frozenset[str]:
    """The local variables whose values are used somewhere; all of them where code may ask for all."""
    found = {*code.co_cellvars, *code.co_freevars}
    for step in _steps(code)[0]:
        named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith("LOAD_FAST"):
            found.update(named)
        elif step.opname == "STORE_FAST_LOAD_FAST":
            found.add(named[-1])
        elif step.argval in ("locals", "vars", "eval", "exec", "dir", "_getframe", "currentframe"):
            return frozenset(code.co_varnames)
    return frozenset(name for name in found if isinstance(name, str))


def _targets(steps: list[dis.Instruction], i: int) -> tuple[list[str | None], int]:
    """Where the values of an unpacking go: the names of local variables, None for anything else."""
    count, names, i = int(steps[i].arg or 0), list[str | None](), i + 1
    while len(names) < count:
        step = steps[i]
        if step.opname == "UNPACK_SEQUENCE":
            _, i = _targets(steps, i)
            names.append(None)
        elif step.opname in ("STORE_DEREF", "STORE_GLOBAL", "STORE_NAME"):
            names.append(None)
            i += 1
        elif step.opname in ("STORE_FAST", "STORE_FAST_STORE_FAST"):
            names += step.argval if isinstance(step.argval, tuple) else [step.argval]
            i += 1
        else:
            return (names + [None] * count)[:count], i
    return names[:count], i
