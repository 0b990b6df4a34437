"""A block whose backward computes it again: `torch.utils.checkpoint`, with everything as its first forward saw it.

`torch.utils.checkpoint` replays torch's generators and autocast. What it leaves to its user is done here: buffers that
a forward writes to (batch norm statistics) are written once, attributes and caches change once, and Python's, numpy's
and the block's own generators are replayed too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from profiler.tracing.fake_tensors.patches import python_generators, set_python_generators
from profiler.tracing.joint import Template

Forward = Callable[..., Any]
Buffer = tuple[str, str]  # the name of its module, and its own

# Values that nobody can change in place: a second call may get the same ones.
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Enum, type)

# What a module's attributes hold beside the user's own: containers that are looked into where it matters.
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules", "forward"})


class Recomputation:
    """Called in the place of a block's forward: the backward of each call runs that forward again.

    `modules` are all that the forward runs, by name; `written` has the buffers that forwards are known to write to, by
    module and name, and gets those that are found to be.
    """

    def __init__(self, forward: Forward, modules: Mapping[str, nn.Module], written: set[Buffer]) -> None:
        self._forward = forward
        self._modules = modules
        self._written = written

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the forward returns; nothing is recomputed where no backward can follow."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        arguments = Arguments(args, kwargs)
        first, moment = [(args, kwargs)], _Moment(self._modules, self._written)

        def run(*tensors: Tensor) -> Any:
            # The first time with the caller's own objects, which a block may change (a cache, a list).
            again_args, again_kwargs = first.pop() if first else arguments.filled(tensors)
            return self._forward(*again_args, **again_kwargs)

        returned = checkpoint(run, *arguments.tensors(), use_reentrant=False, context_fn=moment.contexts)
        self._note_written(moment)
        return returned

    def _note_written(self, moment: _Moment) -> None:
        """Buffers that were never written before: from now on they are kept for the second run."""
        new = moment.written_since() - self._written
        if not new:
            return
        self._written |= new
        moment.protect(new)
        names = ", ".join(f"{module}.{name}" for module, name in sorted(new))
        warnings.warn(
            f"a recomputed block has written to {names} for the first time: in this step its recomputation reads what "
            "was written, in later ones what was there before",
            UserWarning,
            stacklevel=3,
        )


class Arguments:
    """What a call gets, taken apart: its tensors, and how to make the rest anew for a second call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._tensors: list[Tensor] = []
        self._parts: list[Callable[[Sequence[Tensor]], Any]] = [self._part(leaf) for leaf in leaves]

    def tensors(self) -> list[Tensor]:
        """The tensors, which are let go of."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """`(args, kwargs)` as they were, with these tensors in them."""
        return pytree.tree_unflatten([part(tensors) for part in self._parts], self._tree)

    def _part(self, leaf: Any) -> Callable[[Sequence[Tensor]], Any]:
        first = len(self._tensors)
        if isinstance(leaf, Tensor):
            self._tensors.append(leaf)
            return lambda tensors: tensors[first]
        if isinstance(leaf, (*_PLAIN, nn.Module)) or callable(leaf):
            return lambda tensors: leaf
        template, inner = Template.of(leaf)
        self._tensors += inner
        return lambda tensors: template.filled(tensors[first : first + len(inner)])


class _Moment:
    """Some modules as they were when this was made; inside of it they are so again, and afterwards as before it."""

    def __init__(self, modules: Mapping[str, nn.Module], written: set[Buffer]) -> None:
        self._modules = modules
        self._attributes = {path: _own(module) for path, module in modules.items()}
        self._buffers = {(path, name): b for path, m in modules.items() for name, b in m._buffers.items()}
        self._versions = {key: _version(buffer) for key, buffer in self._buffers.items()}
        self._copies = {key: _copy(buffer) for key, buffer in self._buffers.items() if key in written}
        self._python = python_generators()
        self._generators = [(g, g.get_state()) for own in self._attributes.values() for g in _generators(own)]
        self._left: list[Callable[[], None]] = []  # what puts back how things were before it was entered

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the forward and for its recomputation, as `torch.utils.checkpoint` wants them."""
        return nullcontext(), self

    def written_since(self) -> set[Buffer]:
        """Buffers that are another tensor by now, or say that they were written to."""
        return {
            (path, name)
            for path, module in self._modules.items()
            for name, now in module._buffers.items()
            if now is not self._buffers.get((path, name)) or _version(now) != self._versions.get((path, name))
        }

    def protect(self, keys: set[Buffer]) -> None:
        """Give the second run copies of these buffers too: of what they are now, where it is too late for before."""
        for path, name in keys:
            before, now = self._buffers.get((path, name)), self._modules[path]._buffers[name]
            self._copies[path, name] = _copy(now if before is now else before)

    def __enter__(self) -> None:
        python = python_generators()
        self._left = [lambda: set_python_generators(python)]
        for path, own in self._attributes.items():
            self._left.append(_swap(vars(self._modules[path]), own, kept=_CONTAINERS))
        for (path, name), copy in self._copies.items():
            buffers = self._modules[path]._buffers
            self._left.append(_swap(buffers, {**buffers, name: _copy(copy)}))
        for generator, state in self._generators:
            self._left.append(_set_generator(generator, state))
        set_python_generators(self._python)

    def __exit__(self, *_: object) -> None:
        while self._left:
            self._left.pop()()


def _own(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _CONTAINERS}


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _version(buffer: Tensor | None) -> int:
    return -1 if buffer is None or buffer.is_inference() else buffer._version


def _generators(attributes: dict[str, Any]) -> list[torch.Generator]:
    return [value for value in attributes.values() if isinstance(value, torch.Generator)]


def _swap(live: dict[str, Any], contents: dict[str, Any], *, kept: frozenset[str] = frozenset()) -> Callable[[], None]:
    """Give a dict other contents, those under `kept` names left alone; what gives it back its own."""
    before = dict(live)
    _fill(live, contents, kept)
    return lambda: _fill(live, before, kept)


def _fill(live: dict[str, Any], contents: dict[str, Any], kept: frozenset[str]) -> None:
    for name in [name for name in live if name not in contents and name not in kept]:
        del live[name]
    for name, value in contents.items():
        if name not in kept and live.get(name, live) is not value:
            live[name] = value


def _set_generator(generator: torch.Generator, state: Tensor) -> Callable[[], None]:
    now = generator.get_state()
    generator.set_state(state)
    return partial(_restore_generator, generator, now)


def _restore_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)
