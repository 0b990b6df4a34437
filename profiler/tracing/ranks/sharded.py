"""fully_shard as ops of the graph: shards are gathered where they are read, gradients reduced to shards again.

A distributed tensor is an input of the graph by the part that this process holds. A gather may run again in the
backward, as the plan decides; a reduction runs once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.collectives import operators
from profiler.errors import CaptureError
from profiler.tracing.guards import Guard
from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks import torch_shards as fsdp
from profiler.tracing.ranks.parallel import Communicating

# A parameter of at most so many bytes takes longer to begin with than to gather, whatever sends it.
SMALL_BYTES = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGuard:
    """What decides how a sharded model communicates."""

    model: nn.Module
    reduces: tuple[bool, ...]

    @staticmethod
    def of(model: nn.Module) -> ShardGuard:
        """As it is."""
        return ShardGuard(model=model, reduces=_reduces(model))

    def holds(self) -> bool:
        return _reduces(self.model) == self.reduces

    def mismatches(self) -> Iterator[str]:
        if not self.holds():
            yield "which units of the sharded model reduce their gradients (set_requires_gradient_sync) has changed"


def _reduces(model: nn.Module) -> tuple[bool, ...]:
    return tuple(unit.reduces for unit in fsdp.sharded_units(model))


class Shards(Communicating):
    """fully_shard: a unit's parameters are whole while its forward runs, and their gradients sharded after it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._units = fsdp.sharded_units(model)
        self._sharded: dict[int, list[Tensor]] = {}  # of each unit whose forward runs
        self._first: dict[int, tuple[Tensor, ...]] = {}  # what each unit's first forward since a backward gathered
        self.guards: tuple[Guard, ...] = (ShardGuard.of(model),)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Our hooks in the place of torch's; whoever keeps the modules' attributes puts those back."""
        fsdp.remove_own_hooks(self._model)
        for number, unit in enumerate(self._units):
            unit.module.register_forward_pre_hook(self._unshard(number), prepend=True)
            unit.module.register_forward_hook(self._reshard(number), always_call=True)
        with private.waits_alias():
            yield

    def _unshard(self, number: int) -> Any:
        unit = self._units[number]

        def hook(*_: Any) -> None:
            if not unit.reduces:
                raise CaptureError(
                    "set_requires_gradient_sync(False) keeps whole gradients on every rank, which is not captured: "
                    "let each micro-step reduce its gradients, which add up in the shards"
                )
            shards = [module._parameters[key] for module, key in (param.places[0] for param in unit.params)]
            if number in self._sharded or any(shard is None for shard in shards):
                raise CaptureError("a sharded module is called inside its own forward, which is not captured")
            self._sharded[number] = [shard for shard in shards if shard is not None]
            _put(unit, self._gathered(number))

        setattr(hook, fsdp.GATHERS, True)
        return hook

    def _gathered(self, number: int) -> tuple[Tensor, ...]:
        """A unit's whole parameters: its gradients are summed over all its forwards, and then reduced, once."""
        gather: Any = _Gather.apply
        if not torch.is_grad_enabled():
            whole: tuple[Tensor, ...] = gather(self._units[number], *self._sharded[number])
            return whole
        if number not in self._first:
            self._first[number] = gather(self._units[number], *self._sharded[number])
            return self._first[number]
        with torch.no_grad():
            again: tuple[Tensor, ...] = gather(self._units[number], *self._sharded[number])
        same: Any = _SameParameter.apply
        return tuple(map(same, again, self._first[number]))

    def after_backward(self) -> None:
        """Forwards from here on are reduced by another one."""
        self._first.clear()

    def _reshard(self, number: int) -> Any:
        def hook(*_: Any) -> None:
            if number in self._sharded:  # which it is not where gathering was refused
                _put(self._units[number], self._sharded.pop(number))

        setattr(hook, fsdp.GATHERS, True)
        return hook


def _put(unit: fsdp.ShardedUnit, tensors: Sequence[Any]) -> None:
    for param, tensor in zip(unit.params, tensors, strict=True):
        for module, key in param.places:
            module._parameters[key] = tensor


class _Gather(torch.autograd.Function):
    """Whole parameters of a unit's shards; its backward is one reduction, in the layout of fully_shard's own."""

    @staticmethod
    def forward(ctx: Any, unit: fsdp.ShardedUnit, *shards: Any) -> tuple[Tensor, ...]:
        ctx.unit, ctx.specs = unit, [private.spec_of(shard) for shard in shards]
        ctx.set_materialize_grads(False)
        parts = [_padded(private.local(shard), param, unit) for shard, param in zip(shards, unit.params, strict=True)]
        whole: dict[int, Tensor] = {}
        for together in _together(parts, unit):
            rows = (
                [_gathered(parts[together[0]], unit)]
                if len(together) == 1
                else _gathered_flat([parts[i] for i in together], unit)
            )
            whole |= dict(zip(together, rows, strict=True))
        return tuple(_without_padding(whole[i], param) for i, param in enumerate(unit.params))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        unit: fsdp.ShardedUnit = ctx.unit
        ops, world, name = operators(), dist.get_world_size(unit.group), str(unit.group.group_name)
        given = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        found: list[Any] = [None] * len(gradients)
        if not given:
            return (None, *found)
        flat = torch._chunk_cat([gradient for _, gradient in given], dim=0, num_chunks=world).view(-1)
        mean = "avg" if world > 1 else "sum"
        if private.has_own_reduce_scatter(unit.group):
            own = ops.wait_tensor(ops.reduce_scatter_tensor(flat, mean, world, name))
        else:
            whole = ops.wait_tensor(ops.all_reduce_(flat, mean, name))
            own = whole.view(world, -1)[dist.get_rank(unit.group)].clone()
        at = 0
        for i, _ in given:
            param = unit.params[i]
            part = own.as_strided(param.own_size, _strides(param.own_size), at)
            found[i] = private.distributed(part, ctx.specs[i])
            at += param.padded_size.numel()
        return (None, *found)


class _SameParameter(torch.autograd.Function):
    """A parameter that was gathered again: its gradient belongs to what was gathered first."""

    @staticmethod
    def forward(ctx: Any, again: Tensor, first: Tensor) -> Tensor:
        return again

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def _padded(part: Tensor, param: fsdp.ShardedParam, unit: fsdp.ShardedUnit) -> Tensor:
    """One rank's rows with their padding: the same op and size on every rank, since shards lie in padded memory."""
    if param.is_even(dist.get_world_size(unit.group)):
        return part
    return part.as_strided(param.padded_size, _strides(param.padded_size))


def _without_padding(rows: Tensor, param: fsdp.ShardedParam) -> Tensor:
    return rows if rows.shape == param.whole_size else rows.narrow(0, 0, param.whole_size[0])


def _together(parts: Sequence[Tensor], unit: fsdp.ShardedUnit) -> Iterator[list[int]]:
    """Which parameters of a unit are gathered by one collective: each large one alone, all small ones of a type."""
    world, small = dist.get_world_size(unit.group), dict[torch.dtype, list[int]]()
    for i, part in enumerate(parts):
        if part.numel() * part.element_size() * world > SMALL_BYTES:
            yield [i]
        else:
            small.setdefault(part.dtype, []).append(i)
    yield from small.values()


def _gathered(part: Tensor, unit: fsdp.ShardedUnit) -> Tensor:
    """The rows of all ranks."""
    ops, world, name = operators(), dist.get_world_size(unit.group), str(unit.group.group_name)
    rows: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(part, world, name))
    return rows


def _gathered_flat(parts: Sequence[Tensor], unit: fsdp.ShardedUnit) -> Iterator[Tensor]:
    """The rows of all ranks of several parameters, by one collective."""
    world = dist.get_world_size(unit.group)
    of_ranks = _gathered(torch.cat([part.reshape(-1) for part in parts]), unit).view(world, -1)
    at = 0
    for part in parts:
        rows = of_ranks.narrow(1, at, part.numel())
        yield rows.reshape(world * part.shape[0], *part.shape[1:])
        at += part.numel()


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    found, step = list[int](), 1
    for one in reversed(size):
        found.append(step)
        step *= max(one, 1)
    return tuple(reversed(found))
