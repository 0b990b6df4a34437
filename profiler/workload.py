"""What is trained, under one name: a training step with its model, its optimizer and a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from profiler.errors import CaptureError

TrainStep = Callable[[Any, Any, Any], Any]


class Workload(NamedTuple):
    """`train_step(model, optimizer, batch)` and all that it takes; still a plain tuple for who makes one."""

    train_step: TrainStep
    model: nn.Module
    optimizer: Optimizer | None
    batch: Any

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return device_of(self.model)

    def run(self, batch: Any) -> Any:
        """One step as the user wrote it."""
        return self.train_step(self.model, self.optimizer, batch)

    def run_once(self) -> Any:
        """One step on the workload's own batch."""
        return self.run(self.batch)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters lie; the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


class NoOptimizer(Optimizer):
    """Stands for the optimizer of a step that has none: no groups, no state, and it is never stepped."""

    def __init__(self) -> None:
        super().__init__([torch.empty(0)], {})  # the base refuses an empty list
        self.param_groups.clear()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise CaptureError("this step was given no optimizer, so that there is none to step")


def with_stand_in_optimizer(train_step: TrainStep, optimizer: Optimizer | None) -> tuple[TrainStep, Optimizer]:
    """The step and its optimizer; where there is none, a stand-in that the user's step does not get to see."""
    if optimizer is not None:
        return train_step, optimizer

    @wraps(train_step)
    def without_optimizer(model: Any, _: Any, batch: Any) -> Any:
        return train_step(model, None, batch)

    return without_optimizer, NoOptimizer()
