"""Small models and steps that the capture tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from planner.ir import Op
from profiler.tracing.whole_step import TracedStep, capture


def mlp() -> nn.Module:
    """Linear, batch norm, in-place ReLU, dropout, linear."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 4))


def plain() -> nn.Module:
    """Two linear layers without bias: every parameter is a matrix."""
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))


def data() -> tuple[Tensor, Tensor]:
    """Twelve rows of six numbers, in four classes."""
    return torch.randn(12, 6), torch.randint(0, 4, (12,))


def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """The ordinary step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam as it comes: opaque."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


def make(
    train_step: Callable[..., Any] = step,
    *,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    batch: Callable[[], Any] = data,
) -> Callable[[], tuple[Any, ...]]:
    """A function that makes (train_step, model, optimizer, batch) from the current seed."""

    def made() -> tuple[Any, ...]:
        network = model()
        return train_step, network, optimizer(network), batch()

    return made


def captured(
    train_step: Callable[..., Any] = step,
    *,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> tuple[TracedStep, nn.Module, torch.optim.Optimizer, Any]:
    """A captured step that is still the one it was."""
    _, network, chosen, batch = make(model=model, optimizer=optimizer)()
    traced = capture(train_step, network, chosen, batch)
    assert traced.convention.check(batch) == []
    return traced, network, chosen, batch


def op_named(traced: TracedStep, fragment: str) -> Op:
    """The first op whose target contains `fragment`."""
    return next(op for op in traced.graph.ops if fragment in op.target)


def targets(traced: TracedStep) -> list[str]:
    """What the ops call, in order."""
    return [op.target for op in traced.graph.ops]
