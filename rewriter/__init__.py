"""The one-call API: your train step in, the same step under a byte budget out.

from rewriter import checkpoint
step = checkpoint(train_step, model, optimizer, batch, budget="4GiB")
for batch in loader:
    loss = step(batch)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import strategies
from planner.solve import DEFAULT_TIME_LIMIT_S, Strategy
from rewriter.step import CheckpointedStep, OverBudget, Settings, TrainStep
from rewriter.verify import Verification, VerificationError, verify

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
