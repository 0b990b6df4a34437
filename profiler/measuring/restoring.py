"""Trying a step out on the user's own objects, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from profiler.tracing.patches import preserved
from profiler.tracing.whole_step import TracedStep
from profiler.workload import NoOptimizer


@dataclass(frozen=True, kw_only=True)
class Touched:
    """What a step may write to: all of it is compared by a proof, and put back after a trial.

    `generators` are the user's own that it draws from, beside the devices'; `tensors` what it writes to beside model
    and optimizer; `unread_gradients` the parameters whose `.grad` it clears without a look at it.
    """

    model: nn.Module
    optimizer: Optimizer | None
    generators: Sequence[torch.Generator] = ()
    tensors: Sequence[Tensor] = ()
    unread_gradients: Sequence[Tensor] = ()

    @staticmethod
    def by(traced: TracedStep, batch: Any) -> Touched:
        """What the captured step touches when it is called with `batch`."""
        return Touched(
            model=traced.convention.model,
            optimizer=traced.convention.optimizer,
            generators=traced.generators,
            tensors=traced.written_outside(batch),
            unread_gradients=tuple(slot.tensor() for slot in traced.convention.dropped),
        )

    def kept(self) -> AbstractContextManager[None]:
        """Whatever a step does inside: afterwards all of it is as before."""
        return state_kept(self.model, self.optimizer, generators=self.generators, tensors=self.tensors)


@contextmanager
def state_kept(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    generators: Sequence[torch.Generator] = (),
    tensors: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Whatever a step does inside: afterwards every tensor, gradient, counter and generator is as before.

    The copies lie in main memory, wherever the model is. `generators` are the user's own, beside the devices';
    `tensors` are what the step writes to beside the model and the optimizer. One thing that cannot be put back does not
    keep the others from it.
    """
    optimizer = NoOptimizer() if optimizer is None else optimizer
    params = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    live = list({id(t): t for t in (*_tensors(model, params, states), *tensors)}.values())
    with ExitStack() as restoring:  # the last registered first, each whatever became of the others
        for generator in generators:
            restoring.callback(generator.set_state, generator.get_state())
        for group in optimizer.param_groups:  # some optimizers count in their groups
            restoring.callback(_refill, group, dict(group))
        restoring.callback(_refill, optimizer.state, states)
        for p in params:
            restoring.callback(setattr, p, "grad", p.grad)
        for tensor in live:
            restoring.callback(_restorer(tensor))
        restoring.enter_context(preserved(model, optimizer))
        yield


def _restorer(tensor: Tensor) -> Callable[[], None]:
    """What puts a tensor back: its values, and the memory and shape that it had."""
    return partial(_restore, tensor, tensor.detach(), tensor.detach().to("cpu", copy=True))


def _restore(tensor: Tensor, alias: Tensor, copy: Tensor) -> None:
    with torch.no_grad():
        if tensor.layout == torch.strided and not _same_memory(tensor, alias):
            _give_back_memory(tensor, alias)
        tensor.copy_(copy)


def _same_memory(tensor: Tensor, alias: Tensor) -> bool:
    return (
        tensor.dtype == alias.dtype
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and _extent_bytes(alias) <= alias.untyped_storage().nbytes()
    )


def _give_back_memory(tensor: Tensor, alias: Tensor) -> None:
    storage, needed = alias.untyped_storage(), _extent_bytes(alias)
    if storage.nbytes() < needed:  # the step shrank it (`resize_`)
        storage.resize_(needed)
    tensor.data = alias


def _extent_bytes(tensor: Tensor) -> int:
    """How far into its storage a tensor reaches."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _refill(live: Any, before: dict[Any, Any]) -> None:
    live.clear()
    live.update(before)


def _tensors(model: nn.Module, params: list[Any], states: dict[Any, dict[str, Any]]) -> list[Tensor]:
    """Every tensor that a step may write to, once."""
    gradients = [p.grad for p in params if p.grad is not None]
    inner = [v for state in states.values() for v in state.values() if isinstance(v, Tensor)]
    return list({id(t): t for t in (*params, *model.buffers(), *gradients, *inner)}.values())
