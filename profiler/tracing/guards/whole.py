"""All that a graph has baked in. `holds` is asked at every step, sentences are made only where it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from profiler.tracing.guards.batches import BatchGuard
from profiler.tracing.guards.changes import Change
from profiler.tracing.guards.left_behind import LeftBehind
from profiler.tracing.guards.optimizers import OptimizerGuard
from profiler.tracing.guards.putting_back import PuttingBack
from profiler.tracing.guards.tensors import Slot


class Guard(Protocol):
    """Something that must stay as it was."""

    def holds(self) -> bool: ...

    def mismatches(self) -> Iterator[str]: ...


@dataclass(frozen=True, kw_only=True)
class Guards:
    """What the graph has baked in. `mismatches` says what no longer holds."""

    batch: BatchGuard
    surroundings: tuple[Guard, ...]  # modes and switches, the model, what the step reads beside it
    optimizer: OptimizerGuard
    gradients: tuple[tuple[Slot, bool], ...]
    changes: tuple[Change, ...]  # what the step changed itself while it was traced
    once: tuple[str, ...]  # what else it does while it is traced that is another at each step, in words
    trials: PuttingBack  # what else it left behind, laid out for another trace
    watch_also: Callable[..., None]  # of these changes, what was there before counts after all
    left: LeftBehind  # what each call leaves in objects of the user's

    def mismatches(self, optimizer: Optimizer, batch: Any) -> Iterator[str]:
        """What differs from the captured step, one sentence each."""
        yield from self.batch.mismatches(batch)
        for guard in self.surroundings:
            if not guard.holds():
                yield from guard.mismatches()
        yield from self.optimizer.mismatches(optimizer)
        for slot, present in self.gradients:
            param = slot.find()
            if param is not None and (param.grad is not None) != present:
                yield f"{slot.name}.grad was {'a tensor' if present else 'None'} when the step began"

    def holds(self, optimizer: Optimizer, batch: Any) -> bool:
        """Whether the step is still the captured one."""
        return next(self.mismatches(optimizer, batch), None) is None

    def changed_numbers(self, optimizer: Optimizer) -> list[str]:
        """What differs in the optimizer's numbers alone; one that runs outside the graph reads them anew."""
        return self.optimizer.changed_numbers(optimizer)
