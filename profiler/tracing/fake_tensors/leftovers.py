"""Stand-ins of a trace that are still somewhere when it is over: found, and told by the place that holds them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.eager_ways.live_numbers import LIVE
from profiler.tracing.guards.kinds import own_dict
from profiler.tracing.guards.territory import is_own

_MOST_LOOKED_AT = 2000


def refuse_leftovers(mode: FakeTensorMode, graph: fx.Graph) -> None:
    """CaptureError where anything but graphs holds a stand-in of the trace that is over and made `graph`."""
    for node in graph.nodes:
        node.meta.pop("eager_input_vals", None)  # torch's note of what a custom op was called with
    gc.collect()  # what only holds itself is nowhere
    found = list(_stand_ins(mode, graph))
    if not _are_held(found):
        return
    for left in found:
        if _are_held([left], besides=found):
            raise CaptureError(
                f"the step left a stand-in of a traced tensor in {place_of(left)}, from where it cannot be taken away: "
                "return it from the step and keep what the call returns, or plan the model alone with "
                "checkpoint_model(model, budget=...)"
            )


def _stand_ins(mode: FakeTensorMode, graph: fx.Graph) -> Iterator[Any]:
    known = {id(value) for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val"))}
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, (FakeTensor, LIVE))}  # few, of many objects
    for one in [one for one in objects if type(one) in kinds]:
        ours = one.fake_mode is mode if isinstance(one, FakeTensor) else one.source.graph is graph
        if ours and id(one) not in known:
            yield one


def _are_held(found: list[Any], *, besides: Any = None) -> bool:
    """Whether anything holds one of these but frames of ours and what graphs note of nodes, those taken out included.

    Python is asked for all of them at once: each question goes through everything that there is.
    """
    if not found:
        return False
    holders = [one for one in gc.get_referrers(*found) if one is not found and one is not besides]
    holders = [one for one in holders if not isinstance(one, FrameType)]
    if not all(isinstance(one, dict) for one in holders):
        return True
    of_nodes = {id(one.meta) for one in gc.get_referrers(*holders) if isinstance(one, fx.Node)} if holders else set()
    return not all(id(one) in of_nodes for one in holders)


# -- where it is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Hop:
    """One step from an object to what holds it: the path from there, and whether the holder has a name of its own."""

    holder: Any
    path: str
    named: bool = False


def place_of(value: Any) -> str:
    """A name of what holds an object, as far up as a name is found."""
    hops, seen = [_Hop(value, "")], {id(value)}
    for below in hops:  # grows while it is gone through: the nearest places first
        for hop in _hops_from(below, {*seen, id(hops)}):
            if hop.named:
                return hop.path
            seen.add(id(hop.holder))
            hops.append(hop)
        if len(hops) > _MOST_LOOKED_AT:
            break
    furthest = hops[-1]
    holder = furthest.holder
    return "a place outside of Python" if holder is value else f"a {type(holder).__name__}{furthest.path}"


def _hops_from(hop: _Hop, seen: set[int]) -> list[_Hop]:
    found = gc.get_referrers(hop.holder)
    skipped = (FrameType, _Hop, GeneratorType)
    others = [one for one in found if id(one) not in seen and not isinstance(one, skipped) and one is not found]
    return [up for one in others if (up := _hop(one, hop)) is not None]


def _hop(holder: Any, below: _Hop) -> _Hop | None:
    value, path = below.holder, below.path
    match holder:
        case dict():
            return _hop_to_dict(holder, below)
        case list() | tuple() | deque():
            return next((_Hop(holder, f"[{i}]{path}") for i, one in enumerate(holder) if one is value), None)
        case CellType():
            return _hop_to_function(holder, path)
        case FunctionType():
            return _Hop(holder, f"the function {holder.__qualname__}{path}", named=True)
        case _lru_cache_wrapper():
            return _Hop(holder, f"the cache of {holder.__wrapped__.__qualname__}", named=True)
        case ModuleType() | type():
            return _Hop(holder, f"{holder.__name__}{path}", named=True)
        case _:
            return _hop_to_object(holder, below)


def _hop_to_function(cell: Any, path: str) -> _Hop:
    closures = [one for one in gc.get_referrers(cell) if isinstance(one, tuple)]
    functions = [one for closure in closures for one in gc.get_referrers(closure) if isinstance(one, FunctionType)]
    for function in functions:
        for name, own in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if own is cell:
                return _Hop(cell, f"the outer variable {name} of {function.__qualname__}{path}", named=True)
    return _Hop(cell, path)


def _hop_to_object(holder: Any, below: _Hop) -> _Hop | None:
    if is_own(type(holder)):
        return None
    name = next((name for name, one in own_dict(holder).items() if one is below.holder), None)
    if name is None:
        return _Hop(holder, below.path)
    return _Hop(holder, f"{type(holder).__name__}.{name}{below.path}", named=True)


def _hop_to_dict(holder: dict[Any, Any], below: _Hop) -> _Hop | None:
    key = next((key for key, one in holder.items() if one is below.holder), None)
    if "__builtins__" in holder:
        return _Hop(holder, f"the global {key} of {holder.get('__name__')}{below.path}", named=True)
    owner = next((one for one in gc.get_referrers(holder) if own_dict(one) is holder), None)
    if owner is None or is_own(type(owner)):
        return _Hop(holder, f"[{key!r}]{below.path}")
    return _Hop(owner, f"{type(owner).__name__}.{key}{below.path}", named=not isinstance(owner, (FunctionType, type)))
