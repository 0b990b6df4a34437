"""What objects lead to: the function below its wrappers, what a view shows, the functions of a member."""

from __future__ import annotations

import configparser
import functools
import gc
import io
import os
import queue
import weakref
from collections import ChainMap, UserDict, UserList
from collections.abc import Iterator
from multiprocessing.sharedctypes import SynchronizedBase
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from profiler.tracing.guards.code_reads import Target
from profiler.tracing.guards.exact import UNSET
from profiler.tracing.guards.kinds import own_dict
from profiler.tracing.guards.territory import is_closed

_DICT_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def innermost(step: Any) -> Any:
    """The function at the bottom of partials, methods, decorators and callable objects."""
    while True:
        if isinstance(step, functools.partial):
            step = step.func
        elif isinstance(step, MethodType):
            step = step.__func__
        elif isinstance(step, FunctionType):
            if not hasattr(step, "__wrapped__"):
                return step
            step = step.__wrapped__
        else:
            call = type(step).__call__
            if not isinstance(call, FunctionType):
                return step
            step = call


_WITH_DATA = (UserDict, UserList, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)


def is_weak(value: Any) -> bool:
    """Whether something points to an object without keeping it alive."""
    return type(value) in weakref.ProxyTypes or isinstance(value, weakref.ref)


def pointed_at(value: Any) -> Any:
    """What a weak reference or a proxy points to; None where that is gone."""
    if type(value) not in weakref.ProxyTypes:
        return value()
    try:
        return value.__init__.__self__  # a proxy hands on whatever is asked of it
    except ReferenceError:
        return None


def inside(value: Any) -> Iterator[Any]:
    """What an object without values of its own leads to."""
    if isinstance(value, MethodType):
        yield value.__func__
        yield value.__self__
    elif isinstance(value, property):
        yield from (one for one in (value.fget, value.fset) if one is not None)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, _WITH_DATA):
        yield vars(value)["data"]
        yield type(value)
    elif value is os.environ:
        yield vars(value)["_data"]
    elif isinstance(value, ChainMap):
        yield value.maps
        yield type(value)
    elif isinstance(value, _DICT_VIEWS):
        yield from gc.get_referents(value)
    elif isinstance(value, SynchronizedBase):
        yield value.get_obj()
    elif isinstance(value, configparser.RawConfigParser):
        yield from (own_dict(value)["_sections"], own_dict(value)["_defaults"])
    elif isinstance(value, configparser.SectionProxy):
        yield value.parser
    elif isinstance(value, queue.Queue):
        yield value.queue
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__


def is_unseen_iterator(value: Any) -> bool:
    """Whether something is drawn from an object whose position cannot be told."""
    kind: Any = type(value)
    return hasattr(kind, "__next__") and is_closed(kind) and not isinstance(value, io.IOBase)


def functions_in(member: Any) -> Iterator[FunctionType]:
    """The Python functions that a member of a class is made of."""
    if isinstance(member, FunctionType):
        yield member
    elif isinstance(member, (staticmethod, classmethod, property, functools.cached_property)):
        for inner in inside(member):
            yield from functions_in(inner)


def metaclasses_of(cls: type) -> tuple[Any, ...]:
    """What a class is an object of, below `type` itself: what these have, it has, too."""
    meta: Any = type(cls)
    return tuple(meta.__mro__[:-2])


def asks_others(kind: type) -> bool:
    """Whether attributes of such objects are looked up by code of their class, perhaps on other objects."""
    found = [vars(cls) for cls in kind.__mro__[:-1] if cls is not nn.Module]
    return any("__getattr__" in own or "__getattribute__" in own for own in found)


def resolve(target: Target, known: dict[str, Any]) -> Any:
    """The object that an expression of a function means, where that can be told without running it; else UNSET."""
    value = known.get(target.root, UNSET)
    for name in target.chain:
        value = own_dict(value).get(name, UNSET)
    return value
