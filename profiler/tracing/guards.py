"""What a graph has baked in of the user's objects, and a sentence for each thing that no longer holds.

`holds` is asked at every step: it compares identities of what was noted at capture. Only where it fails are values
compared and sentences made.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, repeat
from numbers import Real
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

# What a step may take, return and read as it is: it never changes in place.
PLAIN = (int, float, bool, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)


class Guard(Protocol):
    """One thing that must stay as it was."""

    def holds(self) -> bool: ...

    def mismatches(self) -> Iterator[str]: ...


class Slot(Protocol):
    """A place that a live tensor is read from; `find` gives None where it is gone, `tensor` raises."""

    @property
    def name(self) -> str: ...

    def find(self) -> Tensor | None: ...

    def tensor(self) -> Tensor: ...


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


# -- tensors ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the graph assumes of an input tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # () where the layout has none
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The specification that `tensor` meets."""
        return TensorSpec(
            shape=tuple(tensor.shape),
            stride=tensor.stride() if tensor.layout == torch.strided else (),
            dtype=tensor.dtype,
            device=tensor.device,
            layout=tensor.layout,
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` meets this specification."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and tensor.layout == self.layout
            and (self.layout != torch.strided or tensor.stride() == self.stride)
        )

    def __str__(self) -> str:
        order = f"stride {list(self.stride)}" if self.layout == torch.strided else str(self.layout)
        return f"{self.dtype}{list(self.shape)} {order} on {self.device}"


def hooks_of(tensor: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What runs on a tensor's gradient, and what runs once it is accumulated."""
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return tuple(before.values()) if before else (), tuple(after.values()) if after else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGuard:
    """A parameter or buffer as the graph reads it."""

    slot: Slot
    spec: TensorSpec
    requires_grad: bool
    hooks: tuple[tuple[Any, ...], tuple[Any, ...]]

    @staticmethod
    def of(slot: Slot, tensor: Tensor) -> TensorGuard:
        """The guard that `tensor`, which lies in `slot`, meets."""
        return TensorGuard(
            slot=slot, spec=TensorSpec.of(tensor), requires_grad=tensor.requires_grad, hooks=hooks_of(tensor)
        )

    def holds(self) -> bool:
        now = self.slot.find()
        return (
            now is not None
            and self.spec.fits(now)
            and now.requires_grad == self.requires_grad
            and hooks_of(now) == self.hooks
        )

    def mismatches(self) -> Iterator[str]:
        """What differs; nothing where the tensor is gone, which the guard of its module says."""
        name, now = self.slot.name, self.slot.find()
        if now is None:
            return
        if not self.spec.fits(now):
            yield f"{name} was {self.spec} and is {TensorSpec.of(now)}"
        if now.requires_grad != self.requires_grad:
            yield f"{name}.requires_grad was {self.requires_grad} and is {now.requires_grad}"
        if hooks_of(now) != self.hooks:
            yield f"the gradient hooks of {name} are not those of the captured step"


# -- modules ------------------------------------------------------------------------------------------------

_PARTS = {"_modules": "module", "_parameters": "parameter"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGuard:
    """One module as it was: its mode, what it is made of, its hooks, and a `forward` put on it alone."""

    path: str
    module: nn.Module
    training: bool
    parts: tuple[Mapping[str, Any], ...]  # in the order of _PARTS
    buffers: frozenset[str]
    hooks: tuple[Any, ...]
    forward: Any

    @staticmethod
    def of(path: str, module: nn.Module) -> ModuleGuard:
        """The guard that `module`, which lies at `path`, meets."""
        own = vars(module)
        return ModuleGuard(
            path=path,
            module=module,
            training=module.training,
            parts=tuple(dict(own[key]) for key in _PARTS),
            buffers=_present(own["_buffers"]),
            hooks=_module_hooks(own),
            forward=own.get("forward"),
        )

    def holds(self) -> bool:
        own = vars(self.module)
        return (
            self.module.training == self.training
            and all(map(_same_objects, map(own.__getitem__, _PARTS), self.parts))
            and _present(own["_buffers"]) == self.buffers
            and _module_hooks(own) == self.hooks
            and own.get("forward") is self.forward
        )

    def mismatches(self) -> Iterator[str]:
        own, where = vars(self.module), self.path or "model"
        if self.module.training != self.training:
            yield f"module {where}.training was {self.training} and is {self.module.training}"
        for (key, kind), then in zip(_PARTS.items(), self.parts, strict=True):
            yield from self._changes(kind, then, own[key])
        buffers = _present(own["_buffers"])
        for name in sorted(buffers ^ self.buffers):
            yield f"buffer {self._full(name)} is {'new' if name in buffers else 'gone'}"
        if _module_hooks(own) != self.hooks:
            yield f"the hooks of module {where} are not those of the captured step"
        if own.get("forward") is not self.forward:
            yield f"module {where} was given another forward"

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
        return f"{self.path}.{name}" if self.path else name


def _same_objects(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return now.keys() == then.keys() and all(map(is_, now.values(), then.values()))


def _present(buffers: Mapping[str, Tensor | None]) -> frozenset[str]:
    return frozenset([name for name, buffer in buffers.items() if buffer is not None] if buffers else ())


def _module_hooks(own: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([(key, *own[key].items()) for key in _HOOKS if own[key]])


# -- plain values that are read by name -----------------------------------------------------------------------


class _Unset:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "not set"


_UNSET = _Unset()


class _Holder(Protocol):
    """Something that has values under names."""

    def get(self, name: str, default: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Plain values that a graph has baked in; `where` and the name say which."""

    where: str
    holder: _Holder
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @staticmethod
    def of(where: str, holder: _Holder, names: Iterable[str]) -> Values:
        """What `holder` has under `names`, where that is plain or nothing."""
        found = {name: holder.get(name, _UNSET) for name in names}
        kept = {name: value for name, value in found.items() if value is _UNSET or is_plain(value)}
        return Values(where=where, holder=holder, names=tuple(kept), values=tuple(kept.values()))

    def holds(self) -> bool:
        return all(map(is_, map(self.holder.get, self.names, repeat(_UNSET)), self.values))

    def mismatches(self) -> Iterator[str]:
        for name, then in zip(self.names, self.values, strict=True):
            now = self.holder.get(name, _UNSET)
            if not _equal(then, now):
                yield f"{self.where}{name} was {then!r} and is {now!r}"

    def settled(self) -> Values:
        """The same without what has changed since: a step's own counters are no reason to capture it again."""
        pairs = zip(self.names, self.values, strict=True)
        kept = {name: then for name, then in pairs if _equal(then, self.holder.get(name, _UNSET))}
        return Values(where=self.where, holder=self.holder, names=tuple(kept), values=tuple(kept.values()))


def is_plain(value: Any) -> bool:
    """Whether a value never changes in place: a number, a text, None and the like, or a tuple of these."""
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def held_values(model: nn.Module, step: Any) -> list[Values]:
    """Every plain value that the model's modules hold, and that the step reads by name from outside of itself."""
    found = [*_module_values(model), *_step_values(step)]
    return [values for values in found if values.names]


# What every module has, such as `training`: torch's own, and guarded where it matters.
_INTERNAL = frozenset(vars(nn.Module()))


def _module_values(model: nn.Module) -> Iterator[Values]:
    classes: dict[type, list[str]] = {}
    for path, module in model.named_modules():
        own, inherited = vars(module), list[str]()
        for cls in type(module).__mro__:
            if cls not in classes:
                classes[cls] = _class_attributes(cls)
            inherited += classes[cls]
        plain = [name for name, value in own.items() if name not in _INTERNAL and is_plain(value)]
        shadowing = [name for name in inherited if name not in own]  # `model.beta = ...` over a class attribute
        yield Values.of(f"module {path or 'model'}.", own, dict.fromkeys((*plain, *shadowing)))
    for cls, names in classes.items():
        yield Values.of(f"class {cls.__name__}.", vars(cls), names)


def _class_attributes(cls: type) -> list[str]:
    """The plain attributes that a class gives its objects; torch's own classes have theirs for good."""
    if cls is object or cls.__module__.partition(".")[0] == "torch":
        return []
    return [name for name, value in vars(cls).items() if not name.startswith("__") and is_plain(value)]


def _step_values(step: Any) -> Iterator[Values]:
    """What a step reads by name, and what the functions read that it wraps as a partial, a method or a decorator."""
    while step is not None:
        yield from _read_by(step)
        step = _inner(step)


def _inner(step: Any) -> Any:
    if isinstance(step, functools.partial):
        return step.func
    if isinstance(step, MethodType):
        return step.__func__
    if isinstance(step, FunctionType):
        return getattr(step, "__wrapped__", None)
    call = type(step).__call__  # of an object that is called like a function
    return MethodType(call, step) if isinstance(call, FunctionType) else None


def _read_by(step: Any) -> Iterator[Values]:
    if isinstance(step, functools.partial):
        yield Values.of("the step's argument ", step.keywords, step.keywords)
    elif isinstance(step, MethodType) and isinstance(step.__func__, FunctionType):
        own = getattr(step.__self__, "__dict__", {})
        names = [] if isinstance(step.__self__, nn.Module) else _read_from_self(step.__func__.__code__)
        yield Values.of(f"{type(step.__self__).__name__}.", own, [name for name in names if name in own])
    elif isinstance(step, FunctionType):
        names = [name for name in _globals_read(step.__code__) if name in step.__globals__]
        yield Values.of("the global ", step.__globals__, names)
        yield Values.of("the outer variable ", _Cells(step), step.__code__.co_freevars)


def _globals_read(code: CodeType) -> Iterable[str]:
    # Not `co_names`: the name of an attribute (`optimizer.step`) may be that of a global, too.
    return dict.fromkeys(now.argval for _, now in _instructions(code) if now.opname == "LOAD_GLOBAL")


def _read_from_self(code: CodeType) -> Iterable[str]:
    """The attributes that a method reads of its first argument."""
    first = code.co_varnames[0] if code.co_argcount else ""
    pairs = [(before, now) for before, now in _instructions(code) if now.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return dict.fromkeys(now.argval for before, now in pairs if _last_loaded(before) == first)


def _last_loaded(instruction: dis.Instruction) -> Any:
    loaded = instruction.argval  # a pair where one instruction loads two variables
    return loaded[-1] if isinstance(loaded, tuple) and loaded else loaded


def _instructions(code: CodeType) -> Iterator[tuple[dis.Instruction, dis.Instruction]]:
    """Every instruction of a function, and of those defined inside it, after the one before it."""
    yield from pairwise(dis.get_instructions(code))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _instructions(inner)


class _Cells:
    """The variables that a function has closed over."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any, /) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # the variable was deleted, or has no value yet
            return default


# -- mixed precision ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """What the ops of a device are cast to around the step; None where they are not."""

    device_type: str
    dtype: torch.dtype | None

    @staticmethod
    def now(device_types: Iterable[str]) -> tuple[Autocast, ...]:
        """The state here and now, for those of the devices that have one."""
        known = [kind for kind in sorted(set(device_types)) if torch.amp.is_autocast_available(kind)]
        return tuple(Autocast(device_type=kind, dtype=_cast_to(kind)) for kind in known)

    def holds(self) -> bool:
        return _cast_to(self.device_type) is self.dtype

    def mismatches(self) -> Iterator[str]:
        now = _cast_to(self.device_type)
        if now is not self.dtype:
            yield f"autocast on {self.device_type} was {self.dtype or 'off'} and is {now or 'off'}"


def _cast_to(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


# -- all of it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Guards:
    """What the graph has baked in. `mismatches` says what no longer holds."""

    batch_tree: pytree.TreeSpec
    batch_leaves: tuple[Any, ...]  # a TensorSpec, or the Python value itself
    surroundings: tuple[Guard, ...]  # the model, what the step reads beside it, autocast
    groups: tuple[tuple[Tensor, ...], ...]
    numbers: tuple[tuple[int, str, Any], ...]
    gradients: tuple[tuple[Slot, bool], ...]
    traced_optimizer: bool

    def mismatches(self, optimizer: Optimizer, batch: Any) -> Iterator[str]:
        """What differs from the captured step, one sentence each."""
        yield from self._batch_mismatches(batch)
        for guard in self.surroundings:
            if not guard.holds():
                yield from guard.mismatches()
        yield from self._group_mismatches(optimizer)
        yield from self.changed_numbers(optimizer)
        if self.traced_optimizer:
            yield from _untraced(optimizer)
        for slot, present in self.gradients:
            param = slot.find()
            if param is not None and (param.grad is not None) != present:
                yield f"{slot.name}.grad was {'a tensor' if present else 'None'} when the step began"

    def changed_numbers(self, optimizer: Optimizer) -> list[str]:
        """What differs in the optimizer's numbers alone; one that runs outside the graph reads them anew."""
        groups = optimizer.param_groups
        pairs = [(i, key, then, groups[i].get(key)) for i, key, then in self.numbers if i < len(groups)]
        return [
            f"{key!r} of optimizer group {i} was {then!r} and is {now!r}"
            for i, key, then, now in pairs
            if not _equal(then, now)
        ]

    def _batch_mismatches(self, batch: Any) -> Iterator[str]:
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self.batch_tree:
            yield f"the batch was a {self.batch_tree} and is a {tree}"
            return
        for i, (leaf, spec) in enumerate(zip(leaves, self.batch_leaves, strict=True)):
            now = TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf
            if type(now) is not type(spec) or now != spec:
                yield f"batch leaf {i} was {spec} and is {now}"

    def _group_mismatches(self, optimizer: Optimizer) -> Iterator[str]:
        if len(optimizer.param_groups) != len(self.groups):
            yield f"the optimizer had {len(self.groups)} parameter groups and has {len(optimizer.param_groups)}"
            return
        for i, (group, params) in enumerate(zip(optimizer.param_groups, self.groups, strict=True)):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                yield f"the parameters of optimizer group {i} are not those of the captured step"


def _untraced(optimizer: Optimizer) -> Iterator[str]:
    """What an optimizer inside the graph cannot have, and may have been given since."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield "the optimizer was given a step hook"
    for i, group in enumerate(optimizer.param_groups):
        if not isinstance(group["lr"], Real):
            yield f"the learning rate of optimizer group {i} was a number and is a {type(group['lr']).__name__}"
