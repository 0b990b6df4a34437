"""Metrics of a library run as themselves inside a graph: they count in Python, and their shapes hang on data.

While a step is traced their calls are taken out of it, by objects and functions alike, and become calls of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import Patch, patched
from profiler.tracing.guards import Autocast
from profiler.tracing.trials.undoing import watched

_LIBRARY = "torchmetrics"
_METHODS = frozenset({"forward", "update", "compute", "reset"})

Kinds = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class Callee:
    """A function of the library, or a method of one of its objects, which keeps state."""

    what: Any
    method: str = ""

    @property
    def has_state(self) -> bool:
        return bool(self.method)

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others."""
        return id(self.what), self.method

    @property
    def title(self) -> str:
        return f"{type(self.what).__name__}.{self.method}" if self.method else str(self.what.__qualname__)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The call itself, whatever stands there now."""
        return (getattr(self.what, self.method) if self.method else self.what)(*args, **kwargs)


@dataclass(frozen=True)
class Given:
    """The arguments of a call: a tree of plain values, with places for what a graph hands over."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    places: tuple[int, ...]

    def filled(self, values: Sequence[Any]) -> tuple[Any, Any]:
        """Positional and named arguments with these values in the places."""
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return args, kwargs


class LiveCall:
    """One call of a metric inside a graph: tensors in, tensors out, and the metric's own state as it keeps it.

    It runs in the mixed precision that was around it at capture.
    """

    __name__ = __qualname__ = "metric"

    def __init__(
        self, callee: Callee, given: Given, kinds: Kinds, autocast: Sequence[Autocast], *, keeps: bool
    ) -> None:
        self.callee = callee
        self._given = given
        self._kinds = kinds
        self._autocast = tuple(one for one in autocast if one.dtype is not None)
        self._keeps = keeps  # whether it holds on to what it is given

    def __call__(self, *values: Any) -> list[Tensor]:
        if self._keeps:  # the graph goes on with that memory
            values = tuple(value.clone() if isinstance(value, Tensor) else value for value in values)
        args, kwargs = self._given.filled(values)
        with ExitStack() as stack:
            for one in self._autocast:
                stack.enter_context(torch.autocast(one.device_type, dtype=one.dtype))
            stack.enter_context(watched())
            stack.enter_context(untaken())
            made = tensors_in(self.callee.run(*args, **kwargs))
        if self.callee.has_state and kinds_of(made) != self._kinds:
            raise CaptureError(
                f"{self.callee.title} gives tensors of other shapes than it did when the step was captured, "
                f"{kinds_of(made)} for {self._kinds}: call it after the step, with what the step returns"
            )
        return [tensor.detach().clone() for tensor in made]  # it may hold on to them, and the graph write to them


def keeps_state(node: fx.Node) -> bool:
    """Whether a node calls a metric that counts on from call to call."""
    return isinstance(node.target, LiveCall) and node.target.callee.has_state


def tensors_in(made: Any) -> list[Tensor]:
    """The tensors among what a call made."""
    return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Shapes and types."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


# -- taking calls out of a step ---------------------------------------------------------------------------------

Take = Callable[[Callee, tuple[Any, ...], dict[str, Any]], Any]

# Who takes them. Not in a closure: what stands in the place of a function may be noted somewhere.
_take: ContextVar[Take | None] = ContextVar("who takes the calls of metrics", default=None)


@contextmanager
def taken_calls(take: Take) -> Iterator[None]:
    """Inside, `take` gets the calls of metrics, none of which are inside of another."""
    token = _take.set(take)
    try:
        with patched([*_methods(), *_functions()]):
            yield
    finally:
        _take.reset(token)


@contextmanager
def untaken() -> Iterator[None]:
    """Inside, metrics run as if nobody took their calls."""
    token = _take.set(None)
    try:
        yield
    finally:
        _take.reset(token)


def _methods() -> Iterator[Patch]:
    library = sys.modules.get(_LIBRARY)
    for kind in (getattr(library, name, None) for name in ("Metric", "MetricCollection")):
        if kind is not None:
            yield kind, "__getattribute__", _taking_methods(kind.__getattribute__)


def _taking_methods(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def getattribute(self: Any, name: str) -> Any:
        take = _take.get()
        if take is None:
            return get(self, name)
        if name in _METHODS:
            return partial(_taken, take, Callee(self, name))
        if name in get(self, "__dict__").get("_defaults", ()) and not _is_library(sys._getframe(1)):
            raise CaptureError(
                f"the step reads {type(self).__name__}.{name}, the state of a metric, which runs as itself inside a "
                "planned step: read it after the step, or use what the metric's compute() returns"
            )
        return get(self, name)

    return getattribute


def _is_library(frame: FrameType) -> bool:
    """Whether the library itself is running: it makes a hash of its states, for one."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _LIBRARY


def _taken(take: Take, callee: Callee, *args: Any, **kwargs: Any) -> Any:
    return take(callee, args, kwargs)


def _functions() -> Iterator[Patch]:
    prefix = f"{_LIBRARY}.functional"
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(prefix):
            continue
        for name, member in list(vars(module).items()):
            if isinstance(member, FunctionType) and member.__module__.startswith(prefix):
                yield module, name, _taking(member)


def _taking(function: FunctionType) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        take = _take.get()
        return function(*args, **kwargs) if take is None else take(Callee(function), args, kwargs)

    return call
