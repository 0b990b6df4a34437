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
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from planner.errors import PlannerError
from planner.host_link import HostLink
from planner.solve import DEFAULT_TIME_LIMIT_S, Strategy
from profiler.tracing.ranks.replicated import averaged
from profiler.workload import TrainStep, Workload, device_of
from rewriter.other_shapes import MOST_FORMS_BYTES
from rewriter.settings import read_settings
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
    most_shapes: int | None = None,
    most_forms_bytes: int = MOST_FORMS_BYTES,
    free_gradients: bool = False,
    early_updates: bool = False,
    cache_dir: str | Path | None = None,
    host_link: str | float | HostLink | None = None,
    offload_dir: str | Path | None = None,
    host_budget: str | int | None = None,
    reserve: str | None = None,
    process_group: ProcessGroup | None = None,
    show_progress: bool = True,
) -> CheckpointedStep:
    """A drop-in for `train_step(model, optimizer, batch)` whose peak memory stays within `budget`.

    `budget` is bytes of total peak (4_000_000_000, "4GiB"), a share of what the step adds to what is live before
    it ("60%"), or on a GPU what its allocator may hold ("reserved:16GiB"; "auto": what is free, less a margin).
    `strategy` is a name from the registry with its options, or an object; `plan` is a file that
    `CheckpointedStep.save` wrote, used instead. `verify` runs both versions for one step (or as many as it says) and
    raises VerificationError at the first bit that differs; `prove_every` does so again before every so many calls.
    Without an optimizer (None) the step is forward and
    backward: it leaves gradients in `.grad`, as eager does, and the optimizer is yours to step.
    As many shapes of batch are kept captured as are about within `most_forms_bytes`, or `most_shapes` of them.
    `free_gradients` ends each step with `.grad`
    at None, so that gradients go as early as they can; `early_updates` applies each parameter's update as soon as
    its gradient is complete. `cache_dir` is a folder that keeps what was measured and planned: a second start with the
    same step captures and rewrites only. With `host_link` (GB/s such as 24, or "measure") a plan may also move tensors
    to the host and back: from a GPU to pinned memory, from a CPU to files in the folder `offload_dir`, at most
    `host_budget` bytes at a time. `reserve="arena"` has a GPU's allocator hold, before the first step, one piece as
    large as all that the planned step ever has in use, so that it need not ask for pieces that fit badly. With
    `process_group` a plain model trains on all ranks of the group: after each backward every gradient is the mean over
    them, in its own memory. Raises OverBudget if no plan fits; nothing has been changed then.
    """
    _check_proofs(verify, prove_every)
    settings = read_settings(
        Settings,
        device_of(model),
        budget=budget,
        strategy=strategy,
        time_limit_s=time_limit_s,
        plan=plan,
        saved_by="step.save",
        in_place=in_place,
        verify_steps=int(verify),
        prove_every=prove_every,
        most_shapes=most_shapes,
        most_forms_bytes=most_forms_bytes,
        free_gradients=free_gradients,
        early_updates=early_updates,
        cache_dir=cache_dir,
        host_link=host_link,
        offload_dir=offload_dir,
        host_budget=host_budget,
        show_progress=show_progress,
        process_group=process_group,
        reserve=reserve,
    )
    if process_group is not None:
        train_step = averaged(train_step, model, process_group)
    step = CheckpointedStep(Workload(train_step, model, optimizer, batch), settings)
    step.prepare(batch)
    return step


def _check_proofs(verify: bool | int, prove_every: int) -> None:
    if verify < 0:
        raise PlannerError(f"verify={verify}: give True, or the number of steps to run of each version")
    if prove_every < 0:
        raise PlannerError(f"prove_every={prove_every}: give the number of calls between proofs, or 0 for none")
