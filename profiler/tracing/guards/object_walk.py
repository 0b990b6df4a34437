"""The walk from one object to the next, along what code that ran can read, and what was found on it."""

from __future__ import annotations

import array
import ctypes
import functools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from operator import attrgetter
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from profiler.tracing.guards import kinds
from profiler.tracing.guards.exact import UNSET, is_plain
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.inner_objects import (
    functions_in,
    inside,
    is_unseen_iterator,
    is_weak,
    metaclasses_of,
    pointed_at,
)
from profiler.tracing.guards.kinds import Attributes, Kind, Selection, has_state, own_dict, takes_attributes
from profiler.tracing.guards.readable import Readable
from profiler.tracing.guards.snapshots import Snapshots
from profiler.tracing.guards.stale_things import is_stale
from profiler.tracing.guards.territory import (
    is_changed_from_elsewhere,
    is_closed,
    is_installed,
    is_library,
    module_of,
)

MOST_HOLDERS = 50_000
MOST_ENTRIES = 10_000

_OF_LOGGERS = frozenset(vars(logging.getLogger("recompute_planner")))  # what every logger has

# What every module has, such as `training`: torch's own, and guarded by the model's guards.
_INTERNAL = frozenset(vars(nn.Module()))
_FLAT = frozenset({"_flat_weights", "_flat_weight_refs"})  # a recurrent layer's list of its own parameters
OF_OPTIMIZERS = frozenset(
    {"param_groups", "state", "defaults", "step", "_opt_called", "_step_count", "grad_scale", "found_inf"}
    | {
        f"_optimizer_{when}_{where}_hooks"
        for when in ("step", "state_dict", "load_state_dict")
        for where in ("pre", "post")
    }
)

# What a gradient scaler makes at its first use: a captured step goes on with that very tensor.
_MADE_FOR_GOOD = frozenset({"_scale", "_growth_tracker"})

MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in MODULE_HOOKS)

_C_DATA: Any = ctypes._SimpleCData.__mro__[1]  # what all values of ctypes are

_CONTAINERS: tuple[tuple[Any, Kind], ...] = (
    ((dict,), kinds.Entries()),
    ((list, tuple, deque), kinds.Items()),
    ((set, frozenset), kinds.Elements()),
    ((MappingProxyType,), kinds.View()),
)


class Walk:
    """Every object that code which ran can come to, by its id. `follow` one, then `drain`.

    `on_hook` is told of functions that may run where nobody watches.
    """

    def __init__(
        self, readable: Readable, own_modules: set[int], on_hook: Callable[[Any], None], *, whole_optimizer: bool
    ) -> None:
        self.holders: dict[int, list[Holder]] = {}  # by the object
        self.tensors: dict[int, tuple[str, Tensor]] = {}  # that lie outside the model
        self.modules: dict[int, tuple[str, nn.Module]] = {}
        self.once: dict[str, None] = {}  # what happens while the step is traced and is another at each step, in words
        self.unseen: dict[str, None] = {}  # what is read, can change and cannot be watched, in words
        self._strong = set[int]()  # what something that is watched holds, by its id
        self._weak: dict[int, tuple[str, Any]] = {}  # what a weak reference points to
        self.beyond = ""  # the first of what was left out because there is too much
        self.beside = Snapshots()  # what no guard looks after
        self._readable = readable
        self._own_modules = own_modules
        self._on_hook = on_hook
        self._whole_optimizer = whole_optimizer
        self._pending: defaultdict[str, list[Holder]] = defaultdict(list)
        self._idle: defaultdict[int, list[tuple[FunctionType, str]]] = defaultdict(list)  # methods, by their code
        self._queue: deque[tuple[Any, str, str | None, bool]] = deque()
        self._lenient = False

    def follow(self, value: Any, path: str, name: str | None = None, *, lenient: bool = False) -> None:
        """Look at a value that code can find under a name (None: as a part of something) at the next `drain`."""
        if value is not UNSET and not (is_plain(value) and not isinstance(value, Enum)) and not is_stale(value):
            self._strong.add(id(value))
            self._queue.append((value, path, name, lenient))

    def drain(self) -> None:
        """Look at everything that waits, and at what it leads to."""
        while self._queue:
            value, path, name, self._lenient = self._queue.popleft()
            self._look_at(value, path)
            for holder in self.holders.get(id(value), ()):
                if name is None:
                    holder.whole = True
                else:
                    holder.names.add(name)

    def visit(self, names: Iterable[str]) -> None:
        """Follow what waits under these names, where it can be read now."""
        for name in sorted(names):
            for holder in self._pending.pop(name, ()):
                if self._readable.reads(holder, name) or self._readable.sets(name):
                    self.follow(holder.before[name], holder.label(name), name, lenient=holder.lenient)
                else:
                    self._pending[name].append(holder)

    def visit_what_waits_on_tensors(self) -> None:
        """The same for every name that something waits under on a tensor."""
        self.visit([name for name, waiting in self._pending.items() if any(map(_is_on_tensor, waiting))])

    def wake(self, code: CodeType) -> None:
        """Follow the methods of this code, which is about to run."""
        for function, path in self._idle.pop(id(code), ()):
            self.follow(function, path)

    def _look_at(self, value: Any, path: str) -> None:
        if is_weak(value):
            self._follow_weak(pointed_at(value), path)
            return
        if id(value) in self.holders or id(value) in self.modules or id(value) in self.tensors:
            return
        if len(self.holders) >= MOST_HOLDERS:
            self.beyond = self.beyond or path
            return
        if isinstance(value, Tensor):
            self._look_at_tensor(value, path)
        elif isinstance(value, nn.Module):
            self._look_at_module(value, path)
        elif isinstance(value, type):
            self._look_at_class(value)
        elif isinstance(value, ModuleType):
            self.hold(value, path, kinds.Variables(), follow=not is_library(value.__name__))
        elif not self._look_into(value, path):
            self._look_at_object(value, path)

    def _look_into(self, value: Any, path: str) -> bool:
        """Containers, functions and whatever else leads on to other values."""
        for classes, kind in _CONTAINERS:
            if isinstance(value, classes):
                self._hold_container(value, path, kind)
                return True
        if isinstance(value, FunctionType):
            self._look_at_function(value, path)
        elif isinstance(value, functools.partial):
            self.hold(value, path, kinds.Arguments())
        elif isinstance(value, np.ndarray):
            self._look_at_array(value, path)
        elif isinstance(value, (bytearray, memoryview, array.array)):
            small = memoryview(value).nbytes <= kinds.LARGEST_ARRAY_BYTES
            self.hold(value, path, kinds.Content() if small else kinds.Huge())
        elif isinstance(value, _C_DATA):
            small = ctypes.sizeof(value) <= kinds.LARGEST_ARRAY_BYTES
            self.hold(value, path, kinds.Number() if small else kinds.Huge())
        elif isinstance(value, threading.Event):
            self.hold(value, path, kinds.Flag())
        elif isinstance(value, logging.Logger):
            self.hold(value, path, kinds.Level())
            self.hold(value, path, Attributes(without=_OF_LOGGERS))
        elif isinstance(value, attrgetter):
            self.visit(self._readable.note_anywhere(name for text in value.__reduce__()[1] for name in text.split(".")))
        elif isinstance(value, ContextVar):
            self.hold(value, f"the context variable {value.name}", kinds.Context())
        elif has_state(value):
            self.hold(value, path, kinds.State())
        elif isinstance(value, torch.Generator):
            self.beside.note_generator(value)
        elif is_unseen_iterator(value):
            self.once[f"can draw from {path}, a {type(value).__name__}"] = None
        else:
            return self._pass_through(value, path)
        return True

    def _pass_through(self, value: Any, path: str) -> bool:
        inner = list(inside(value))
        for one in inner:
            self.follow(one, path)
        return bool(inner)

    def _follow_weak(self, value: Any, path: str) -> None:
        held = value is None or id(value) in self._strong
        self.follow(value, path)
        if not held:
            self._strong.discard(id(value))
            if not self._lenient and not is_installed(module_of(type(value))):
                self._weak.setdefault(id(value), (path, value))

    def only_weakly(self) -> list[tuple[str, Any]]:
        """What the step comes to by weak references alone, with their paths: to be watched is to be kept alive."""
        return [found for key, found in self._weak.items() if key not in self._strong]

    def _look_at_object(self, value: Any, path: str) -> None:
        kind: Any = type(value)
        if is_closed(kind):
            if is_changed_from_elsewhere(kind):
                self.unseen.setdefault(f"{path} is a {kind.__name__}, which cannot be looked into")
            return
        # While a step is traced, stand-ins lie in its optimizer, and in one that this wraps.
        swapped = isinstance(value, Optimizer) and not self._whole_optimizer
        without = OF_OPTIMIZERS if swapped else frozenset()
        if isinstance(value, GradScaler):
            without = _MADE_FOR_GOOD
        self.hold(value, path, Attributes(without=without))
        self.follow(type(value), class_path(type(value)))
        if isinstance(value, Enum):  # `value` is a property of theirs, and may be a list or a dict
            self.follow(value._value_, f"{path}.value")

    def _look_at_module(self, module: nn.Module, path: str) -> None:
        self.modules[id(module)] = (path, module)
        if id(module) not in self._own_modules:
            self.beside.note_module(module)
        without = _INTERNAL | _FLAT if isinstance(module, nn.RNNBase) else _INTERNAL
        self.hold(module, path, Attributes(without=without))
        self.follow(type(module), class_path(type(module)))
        for name, child in module._modules.items():
            self.follow(child, _child_path(path, name))
        for key in MODULE_HOOKS:
            for hook in list(vars(module)[key].values()):
                self.follow(hook, f"a hook of {path}")
                self._on_hook(hook)
        if not path.startswith("module "):
            own = {**module._parameters, **module._buffers}
            for name, tensor in own.items():
                if tensor is not None and id(tensor) not in self.holders:
                    self._look_at_tensor(tensor, f"{path}.{name}")

    def _look_at_tensor(self, tensor: Tensor, path: str) -> None:
        """One that lies outside the model."""
        self.tensors[id(tensor)] = (path, tensor)
        self.hold(tensor, path, kinds.OnTensor())

    def _look_at_class(self, cls: type) -> None:
        for base in (*cls.__mro__[:-1], *metaclasses_of(cls)):
            if id(base) not in self.holders and (not is_closed(base) or issubclass(base, nn.Module)):
                self.hold(base, class_path(base), kinds.Members(), follow=not is_library(module_of(base)))

    def _look_at_function(self, function: FunctionType, path: str) -> None:
        if is_library(function.__module__ or ""):
            return
        self.hold(function, f" of {function.__name__}", kinds.Cells())
        self.hold(function, function.__name__, kinds.Defaults())
        self.beside.note_attributes(function)
        if own_dict(function) or not is_installed(function.__module__ or ""):
            self.hold(function, function.__name__, Attributes())
            self.follow(own_dict(function).get("__wrapped__"), path)
        for one in own_dict(function).values():
            if isinstance(one, MappingProxyType):  # what is registered with a function.singledispatch
                self.follow(one, f"what is registered with {function.__name__}")

    def _look_at_array(self, array: Any, path: str) -> None:
        if array.dtype == object and array.size <= MOST_ENTRIES:
            self.hold(array, path, kinds.Objects())
            return
        small = array.nbytes <= kinds.LARGEST_ARRAY_BYTES and not array.dtype.hasobject
        self.hold(array, path, kinds.Bytes() if small else kinds.Huge())

    def _hold_container(self, value: Any, path: str, kind: Kind) -> None:
        if len(value) > MOST_ENTRIES and isinstance(value, list):
            self.beside.note_long(value)
        self.hold(value, path, kind if len(value) <= MOST_ENTRIES else kinds.Huge())
        if takes_attributes(value):
            self.hold(value, path, Attributes())
        if isinstance(value, defaultdict):
            self.hold(value, path, kinds.Factory())

    def hold(self, value: Any, path: str, kind: Kind, *, follow: bool = True) -> None:
        """Note what an object holds, and follow what of it can be read."""
        lenient = self._lenient or (isinstance(value, type) and is_installed(module_of(value)))
        holder = Holder(path=path, what=value, kind=kind, late=not follow, lenient=lenient)
        self.holders.setdefault(id(holder.what), []).append(holder)
        if not follow:
            return
        by_name = kind.selection is Selection.NAMES
        for key, one in holder.before.items():
            methods = list(functions_in(one)) if isinstance(value, type) else []
            for function in methods:
                self._idle[id(function.__code__)].append((function, holder.label(key)))
            if methods:
                continue
            if by_name and not self._readable.reads(holder, key) and not self._readable.sets(key):
                self._pending[key].append(holder)
            else:
                name = key if isinstance(key, str) and (by_name or isinstance(kind, kinds.Cells)) else None
                self.follow(one, holder.label(key), name, lenient=lenient)

    def unwatched(self) -> list[Holder]:
        """What is too large to be watched, and is read."""
        huge = [holder for found in self.holders.values() for holder in found if isinstance(holder.kind, kinds.Huge)]
        for holder in huge:
            keys = self._readable.keys(holder)
            if isinstance(keys, frozenset) and isinstance(holder.what, dict):  # a few entries of it are no burden
                holder.kind = kinds.Entries()
                holder.before = {key: dict.__getitem__(holder.what, key) for key in keys if key in holder.what}
                holder.late = holder.partial = True
        return [holder for holder in huge if isinstance(holder.kind, kinds.Huge) and self._readable.keys(holder)]


def _is_on_tensor(holder: Holder) -> bool:
    return isinstance(holder.kind, kinds.OnTensor)


def class_path(cls: type) -> str:
    """What a sentence calls a class."""
    return f"class {cls.__name__}"


def _child_path(path: str, name: str) -> str:
    return f"module {name}" if path == "module model" else f"{path}.{name}"
