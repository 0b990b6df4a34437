"""The one-call API: your train step in, the same step under a byte budget out.

from rewriter import checkpoint
step = checkpoint(train_step, model, optimizer, batch, budget="4GiB")
for batch in loader:
    loss = step(batch)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import strategies
from planner.errors import FileFormatError, PlannerError
from planner.solve import DEFAULT_TIME_LIMIT_S, Strategy
from rewriter.budgets import OverBudget, check_budget
from rewriter.proof import Verification, VerificationError, verify
from rewriter.step import CheckpointedStep, Settings, TrainStep

__all__ = ["CheckpointedStep", "OverBudget", "Verification", "VerificationError", "checkpoint", "verify"]


def checkpoint(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    budget: str | int,
    strategy: str | Strategy = "auto",
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    plan: str | Path | None = None,
    verify: bool | int = False,
    in_place: bool = True,
    most_shapes: int = 8,
    free_gradients: bool = False,
    early_updates: bool = False,
    show_progress: bool = True,
) -> CheckpointedStep:
    """A drop-in for `train_step(model, optimizer, batch)` whose peak memory stays within `budget`.

    `budget` is bytes of total peak (4_000_000_000, "4GiB"), a share of what the step adds to what is live before
    it ("60%"), or on a GPU "auto": what is free, less a margin. `strategy` is a name from the registry with its
    options, or an object; `plan` is a file that `CheckpointedStep.save` wrote, used instead. `verify` runs both
    versions for three steps (or as many as it says) and raises VerificationError at the first bit that differs.
    `most_shapes` bounds how many shapes of batch are kept captured. `free_gradients` ends each step with `.grad`
    at None, so that gradients go as early as they can; `early_updates` applies each parameter's update as soon as
    its gradient is complete. Raises OverBudget if no plan fits; nothing has been changed then.
    """
    chosen = strategies.make(strategy) if isinstance(strategy, str) else strategy
    check_budget(budget, next((p.device for p in model.parameters()), torch.device("cpu")))
    _check_numbers(time_limit_s=time_limit_s, verify=verify, most_shapes=most_shapes)
    if plan is not None and not Path(plan).is_file():
        raise FileFormatError(f"{plan}: there is no such plan; `step.save({str(plan)!r})` writes one")
    settings = Settings(
        budget=budget,
        strategy=chosen,
        label=strategy if isinstance(strategy, str) else strategy.name,
        time_limit_s=time_limit_s,
        in_place=in_place,
        plan_file=plan,
        verify_steps=3 if verify is True else int(verify),
        most_shapes=most_shapes,
        free_gradients=free_gradients,
        early_updates=early_updates,
        show_progress=show_progress,
    )
    step = CheckpointedStep(train_step, model, optimizer, settings)
    step.prepare(batch)
    return step


def _check_numbers(*, time_limit_s: float, verify: bool | int, most_shapes: int) -> None:
    if not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise PlannerError(f"time_limit_s={time_limit_s}: give the seconds that a strategy may take, such as 10")
    if verify < 0:
        raise PlannerError(f"verify={verify}: give True, or the number of steps to run of each version")
    if most_shapes < 1:
        raise PlannerError(f"most_shapes={most_shapes}: the one in use is always kept, so at least 1")
