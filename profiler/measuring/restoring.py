"""Trying a step out on the user's own objects, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from profiler.tracing.patches import preserved


@contextmanager
def state_kept(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    generators: Sequence[torch.Generator] = (),
    tensors: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Whatever a step does inside: afterwards every tensor, gradient, counter and generator is as before.

    The copies lie in main memory, wherever the model is. `generators` are the user's own, beside the devices';
    `tensors` are what the step writes to beside the model and the optimizer.
    """
    params = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    gradients = [(p, p.grad) for p in params]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    groups = [(group, dict(group)) for group in optimizer.param_groups]  # some optimizers count in their groups
    drawn = [(generator, generator.get_state()) for generator in generators]
    live = list({id(t): t for t in (*_tensors(model, params, states), *tensors)}.values())
    saved = [tensor.detach().to("cpu", copy=True) for tensor in live]
    try:
        with preserved(model, optimizer):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(live, saved, strict=True):
                tensor.copy_(copy)
        for p, gradient in gradients:
            p.grad = gradient
        optimizer.state.clear()
        optimizer.state.update(states)
        for group, before in groups:
            group.clear()
            group.update(before)
        for generator, state in drawn:
            generator.set_state(state)


def _tensors(model: nn.Module, params: list[Any], states: dict[Any, dict[str, Any]]) -> list[Tensor]:
    """Every tensor that a step may write to, once."""
    gradients = [p.grad for p in params if p.grad is not None]
    inner = [v for state in states.values() for v in state.values() if isinstance(v, Tensor)]
    return list({id(t): t for t in (*params, *model.buffers(), *gradients, *inner)}.values())
