"""Numbers read from traced tensors: they stay live as long as the step only computes with them and returns them.

Such a number is a node of the graph. Where the step decides by it, the outcome becomes an assumption of the captured
form; where a plain number is needed of it, its value does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched


class Recorder(Protocol):
    """Who records numbers into a graph, and knows what they are in eager."""

    def number(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A new node for a number that `function` computes."""

    def assumed(self, node: fx.Node) -> Any:
        """What the node holds in eager, which from now on the captured form depends on."""


class _Node:
    """What torch's own code asks a symbolic number for."""

    constant = None

    def __init__(self, plain: Callable[[], Any]) -> None:
        self._plain = plain

    def guard_int(self, file: str, line: int) -> int:
        return int(self._plain())

    def guard_float(self, file: str, line: int) -> float:
        return float(self._plain())


class _Live:
    """A number that a traced step has read from a tensor, or computed from such a one."""

    recorder: Recorder
    source: fx.Node
    node: Any

    def plain(self) -> Any:
        """Its value in eager; the captured form holds for this value alone."""
        return self.recorder.assumed(self.source)

    def __bool__(self) -> bool:
        return _decided(operator.truth, self)

    def __float__(self) -> float:
        return float(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __hash__(self) -> int:
        return hash(self.plain())

    def __round__(self, digits: int | None = None) -> Any:
        return _computed(round, self, digits)

    def __repr__(self) -> str:
        return "<a number that the step read from a tensor>"

    def __str__(self) -> str:
        raise CaptureError(
            "the step turns a tensor's value into text while it runs, which a graph cannot do: return the value and "
            "print or log it after the step"
        )

    def __format__(self, spec: str) -> str:
        return str(self)


class LiveFloat(_Live, torch.SymFloat):
    """A live number that is a float."""

    is_integer = _Live.plain

    def __init__(self, recorder: Recorder, source: fx.Node) -> None:
        self.recorder, self.source, self.node = recorder, source, _Node(self.plain)


class LiveInt(_Live, torch.SymInt):
    """A live number that is an int."""

    def __init__(self, recorder: Recorder, source: fx.Node) -> None:
        self.recorder, self.source, self.node = recorder, source, _Node(self.plain)


Live = LiveFloat | LiveInt
LIVE = (LiveFloat, LiveInt)


def _recorded(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Recorder, fx.Node]:
    recorder = next(arg.recorder for arg in args if isinstance(arg, LIVE))
    return recorder, recorder.number(function, *(arg.source if isinstance(arg, LIVE) else arg for arg in args))


def _decided(function: Callable[..., Any], *args: Any) -> bool:
    recorder, node = _recorded(function, args)
    return bool(recorder.assumed(node))


def _computed(function: Callable[..., Any], *args: Any) -> Any:
    """A live number, of the type that Python's rules give; where they depend on the value, a plain one."""
    if not all(isinstance(arg, (*LIVE, int, float, type(None))) for arg in args):
        return NotImplemented
    floats = any(isinstance(arg, (LiveFloat, float)) for arg in args) or function is operator.truediv
    if function is operator.pow or (function is round and args[1] is None):
        return function(*(arg.plain() if isinstance(arg, LIVE) else arg for arg in args))
    recorder, node = _recorded(function, args)
    return LiveFloat(recorder, node) if floats else LiveInt(recorder, node)


def _binary(function: Callable[..., Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    if reflected:
        return lambda self, other: _computed(function, other, self)
    return lambda self, other: _computed(function, self, other)


def _unary(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: _computed(function, self)


def _comparison(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        return _decided(function, self, other) if isinstance(other, (*LIVE, int, float)) else NotImplemented

    return compare


for _kind in LIVE:
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_kind, f"__{_name}__", _binary(getattr(operator, _name), reflected=False))
        setattr(_kind, f"__r{_name}__", _binary(getattr(operator, _name), reflected=True))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _unary(getattr(operator, _name)))
    for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(_kind, f"__{_name}__", _comparison(getattr(operator, _name)))
    for _name in ("trunc", "floor", "ceil"):
        setattr(_kind, f"__{_name}__", lambda self, name=_name: getattr(math, name)(self.plain()))


@contextmanager
def outcomes_in_math() -> Iterator[None]:
    """`math.isfinite` and its like, which would ask a live number for its value, ask for the outcome alone."""
    with patched([(math, name, _outcome(getattr(math, name))) for name in ("isfinite", "isnan", "isinf")]):
        yield


def _outcome(function: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def decide(number: Any, /) -> bool:
        number = number.item() if isinstance(number, Tensor) else number
        return _decided(function, number) if isinstance(number, LIVE) else function(number)

    return decide
