"""Modules as they were: their mode, what they are made of, their hooks, and a `forward` put on one alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from profiler.tracing.guards.object_walk import MODULE_HOOKS
from profiler.tracing.guards.tensors import TensorGuard

_PARTS = {"_modules": "module", "_parameters": "parameter"}
_OWN = itemgetter("training", *_PARTS, "_buffers", *MODULE_HOOKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGuard:
    """One module as it was. `path` is its dotted name in the model, or what the step calls it."""

    path: str
    inside: bool  # whether it is a part of the model, whose buffers are read where they are
    module: nn.Module
    training: bool
    parts: tuple[Mapping[str, Any], ...]  # in the order of _PARTS
    buffers: Mapping[str, Tensor]
    hooks: tuple[Any, ...]

    @staticmethod
    def of(path: str, module: nn.Module) -> ModuleGuard:
        """The guard that `module`, which was found at `path`, meets."""
        own, inside = vars(module), path.startswith("module ")
        return ModuleGuard(
            path=path.removeprefix("module "),
            inside=inside,
            module=module,
            training=module.training,
            parts=tuple(dict(own[key]) for key in _PARTS),
            buffers=_present(own["_buffers"]),
            hooks=_module_hooks(own),
        )

    def holds(self) -> bool:
        own = vars(self.module)
        return (
            self.module.training == self.training
            and all(map(_same_objects, map(own.__getitem__, _PARTS), self.parts))
            and _present(own["_buffers"]).keys() == self.buffers.keys()
            and (self.inside or _same_objects(_present(own["_buffers"]), self.buffers))
            and _module_hooks(own) == self.hooks
        )

    def mismatches(self) -> Iterator[str]:
        own = vars(self.module)
        if self.module.training != self.training:
            yield f"{self._where}.training was {self.training} and is {self.module.training}"
        for (key, kind), then in zip(_PARTS.items(), self.parts, strict=True):
            yield from self._changes(kind, then, own[key])
        buffers = _present(own["_buffers"])
        for name in sorted(buffers.keys() ^ self.buffers.keys()):
            yield f"buffer {self._full(name)} is {'new' if name in buffers else 'gone'}"
        for name in sorted(buffers.keys() & self.buffers.keys()):
            if not self.inside and buffers[name] is not self.buffers[name]:
                yield f"buffer {self._full(name)} was replaced by another"
        if _module_hooks(own) != self.hooks:
            yield f"the hooks of {self._where} are not those of the captured step"

    @property
    def _where(self) -> str:
        return f"module {self.path}" if self.inside else self.path

    def _changes(self, kind: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
        for name in dict.fromkeys((*then, *now)):
            was, is_now = then.get(name), now.get(name)
            if was is None and is_now is not None:
                yield f"{kind} {self._full(name)} is new"
            elif was is not None and is_now is None:
                yield f"{kind} {self._full(name)} is gone"
            elif was is not is_now:
                yield f"{kind} {self._full(name)} was replaced by another"

    def _full(self, name: str) -> str:
        if not self.inside:
            return f"{name} of {self.path}"
        return name if self.path == "model" else f"{self.path}.{name}"


def _same_objects(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return now.keys() == then.keys() and all(map(is_, now.values(), then.values()))


def _present(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in buffers.items() if buffer is not None} if buffers else {}


def _module_hooks(own: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([(key, *own[key].items()) for key in MODULE_HOOKS if own[key]])


# -- all of them at a glance ----------------------------------------------------------------------------------


class Modules:
    """Every module that the step can reach, and the tensors in them."""

    def __init__(self, modules: Sequence[ModuleGuard], tensors: Sequence[TensorGuard]) -> None:
        self._modules = modules
        self._tensors = tensors
        self._ties = _ties(modules)
        self._prepare_glance()

    def _prepare_glance(self) -> None:
        self._own = [vars(guard.module) for guard in self._modules]
        self._states = list(chain.from_iterable(map(_OWN, self._own)))
        self._tables = [own[key] for own in self._own for key in (*_PARTS, "_buffers", *MODULE_HOOKS) if own[key]]
        self._empty = [own[key] for own in self._own for key in (*_PARTS, "_buffers", *MODULE_HOOKS) if not own[key]]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        self._sizes = list(map(len, self._tables))
        self._odd = [guard for guard in self._tensors if guard.spec.layout != torch.strided]
        self._specs: Callable[[], bool] | None = None  # made once the slow way has found nothing

    def holds(self) -> bool:
        """Whether a glance, or else a look at each of them, finds all as it was."""
        if self._untouched():
            return True
        if next(self.mismatches(), None) is not None:
            return False
        self._prepare_glance()
        self._specs = _specs(list({id(tensor): tensor for tensor in self._dense()}.values()))
        return True

    def _dense(self) -> Iterator[Tensor]:
        found = (guard.slot.find() for guard in self._tensors if guard.spec.layout == torch.strided)
        return (tensor for tensor in found if tensor is not None)

    def _untouched(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._tables)) == self._sizes
            and all(map(is_, chain.from_iterable(map(_OWN, self._own)), self._states))
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._entries))
            and self._specs is not None
            and self._specs()
            and all(guard.holds() for guard in self._odd)
        )

    def mismatches(self) -> Iterator[str]:
        """What is not as it was, one sentence each."""
        guards: list[ModuleGuard | TensorGuard] = [*self._modules, *self._tensors]
        for guard in guards:
            if not guard.holds():
                yield from guard.mismatches()
        yield from _untied(self._ties, _ties(self._modules))


def _ties(modules: Iterable[ModuleGuard]) -> dict[str, str]:
    """Under each name of a buffer of the model, the first name of the same buffer."""
    first: dict[int, str] = {}
    found = {}
    for guard in modules:
        for name, buffer in _present(guard.module._buffers).items() if guard.inside else ():
            full = guard._full(name)
            found[full] = first.setdefault(id(buffer), full)
    return found


def _untied(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name, first in then.items():
        tied = now.get(name)
        if tied is None or tied == first:
            continue
        if first != name:
            yield f"buffer {name} was the buffer {first} and is one of its own"
        else:
            yield f"buffer {name} was one of its own and is the buffer {tied}"


_HOOKS = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def _specs(tensors: Sequence[Tensor]) -> Callable[[], bool]:
    """A quick look at what the tensors are: sizes, strides, types, devices, whether differentiated, their hooks."""
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    native = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    trained = [t for t in tensors if t.requires_grad]
    tables = list(chain.from_iterable(map(_HOOKS, trained)))
    contents = [(table, tuple(table.items())) for table in tables if table is not None]

    def as_they_were() -> bool:
        return (
            native.check(*tensors)
            and all(map(is_, chain.from_iterable(map(_HOOKS, trained)), tables))
            and all(tuple(table.items()) == items for table, items in contents)
        )

    return as_they_were
