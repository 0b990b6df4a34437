"""From a training step to a measured graph: `profile()` captures it and measures every op."""

from __future__ import annotations

from runpy import run_path
from typing import Any

run_path(f"{__path__[0]}/../planner/shadowing.py")["check"](__path__[0], "planner")

from torch import nn
from torch.optim import Optimizer

from profiler.errors import CaptureError
from profiler.measuring.op_times import Measured, OpStats, measure
from profiler.tracing.whole_step import TracedStep, capture, capture_without_memory
from profiler.workload import TrainStep, Workload

__all__ = [
    "CaptureError",
    "Measured",
    "OpStats",
    "TracedStep",
    "Workload",
    "capture",
    "capture_without_memory",
    "measure",
    "profile",
]


def profile(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    *,
    name: str = "",
    show_progress: bool = True,
) -> Measured:
    """The whole step as a validated graph with measured times, workspaces, roles and liveness.

    `measured.graph` is what strategies plan on; the model, optimizer and generators stay as they are.
    """
    return measure(capture(train_step, model, optimizer, batch, name=name), batch, show_progress=show_progress)
