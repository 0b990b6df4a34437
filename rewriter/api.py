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

from torch import nn
from torch.optim import Optimizer

import strategies
from planner.errors import FileFormatError, PlannerError
from planner.solve import DEFAULT_TIME_LIMIT_S, Strategy
from profiler.workload import TrainStep, Workload, device_of
from rewriter.budgets import check_budget
from rewriter.step import CheckpointedStep, Settings


def checkpoint(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    *,
    budget: str | int,
    strategy: str | Strategy = "auto",
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    plan: str | Path | None = None,
    verify: bool | int = True,
    prove_every: int = 0,
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
    versions for one step (or as many as it says) and raises VerificationError at the first bit that differs;
    `prove_every` does so again before every so many calls. Without an optimizer (None) the step is forward and
    backward: it leaves gradients in `.grad`, as eager does, and the optimizer is yours to step.
    `most_shapes` bounds how many shapes of batch are kept captured. `free_gradients` ends each step with `.grad`
    at None, so that gradients go as early as they can; `early_updates` applies each parameter's update as soon as
    its gradient is complete. Raises OverBudget if no plan fits; nothing has been changed then.
    """
    chosen = strategies.make(strategy) if isinstance(strategy, str) else strategy
    check_budget(budget, device_of(model))
    _check_numbers(time_limit_s=time_limit_s, verify=verify, prove_every=prove_every, most_shapes=most_shapes)
    if plan is not None and not Path(plan).is_file():
        raise FileFormatError(f"{plan}: there is no such plan; `step.save({str(plan)!r})` writes one")
    settings = Settings(
        budget=budget,
        strategy=chosen,
        label=strategy if isinstance(strategy, str) else strategy.name,
        time_limit_s=time_limit_s,
        in_place=in_place,
        plan_file=plan,
        verify_steps=int(verify),
        prove_every=prove_every,
        most_shapes=most_shapes,
        free_gradients=free_gradients,
        early_updates=early_updates,
        show_progress=show_progress,
    )
    step = CheckpointedStep(Workload(train_step, model, optimizer, batch), settings)
    step.prepare(batch)
    return step


def _check_numbers(*, time_limit_s: float, verify: bool | int, prove_every: int, most_shapes: int) -> None:
    if not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise PlannerError(f"time_limit_s={time_limit_s}: give the seconds that a strategy may take, such as 10")
    if verify < 0:
        raise PlannerError(f"verify={verify}: give True, or the number of steps to run of each version")
    if prove_every < 0:
        raise PlannerError(f"prove_every={prove_every}: give the number of calls between proofs, or 0 for none")
    if most_shapes < 1:
        raise PlannerError(f"most_shapes={most_shapes}: the one in use is always kept, so at least 1")
