"""Trying a step out on the user's own objects, and leaving no trace of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from profiler.ops import memory_of
from profiler.tracing.fake_tensors.patches import preserved, refill
from profiler.tracing.guards import LeftBehind
from profiler.tracing.ranks.torch_distributed import local
from profiler.tracing.ranks.torch_shards import free_whole_parameters
from profiler.tracing.trials.interrupts import interrupts_come_between
from profiler.tracing.trials.undoing import give_memory_of, has_memory_of, undone, watched
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
    step: Any = None  # the user's own, where Python of the user's runs
    is_eager: bool = False  # whether all of it runs, not its optimizer alone
    generators: Sequence[torch.Generator] = ()
    tensors: Sequence[Tensor] = ()
    unread_gradients: Sequence[Tensor] = ()
    left: LeftBehind = field(default_factory=LeftBehind)  # what it leaves in objects of the user's

    @staticmethod
    def by(traced: TracedStep, batch: Any) -> Touched:
        """What the captured step touches when it is called with `batch`."""
        return Touched(
            model=traced.convention.model,
            optimizer=traced.convention.optimizer,
            step=traced.train_step if traced.runs_python else None,
            generators=traced.generators,
            tensors=traced.written_outside(batch),
            unread_gradients=tuple(slot.tensor() for slot in traced.convention.dropped),
            left=traced.convention.guards.left,
        )

    def in_eager(self, step: Any) -> Touched:
        """The same for the user's own step, whose Python runs."""
        return replace(self, step=step, is_eager=True)

    def watched(self) -> AbstractContextManager[None]:
        """Where a step runs inside of `kept`."""
        return watched() if self.is_eager else nullcontext()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever a step does inside: afterwards all of it is as before."""
        kept = state_kept(self.model, self.optimizer, step=self.step, generators=self.generators, tensors=self.tensors)
        with kept, self.left.kept():
            yield


@contextmanager
def state_kept(
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    step: Any = None,
    generators: Sequence[torch.Generator] = (),
    tensors: Sequence[Tensor] = (),
) -> Iterator[None]:
    """Whatever a step does inside: afterwards every tensor, gradient, counter and generator is as before.

    The copies lie in main memory, wherever the model is. `generators` are the user's own, beside the devices';
    `tensors` are what the step writes to beside the model and the optimizer. What the user's Python does to anything
    else under `watched` is undone too; `step` is where it begins. One thing that cannot be put back does not keep the
    others from it.
    """
    optimizer = NoOptimizer() if optimizer is None else optimizer
    params = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    live = list({id(t): t for t in (*_tensors(model, params, states), *tensors)}.values())
    with ExitStack() as restoring:  # the last registered first, each whatever became of the others
        restoring.enter_context(interrupts_come_between())
        restoring.callback(free_whole_parameters, model)
        for generator in generators:
            restoring.callback(generator.set_state, generator.get_state())
        for group in optimizer.param_groups:  # some optimizers count in their groups
            restoring.callback(_refill, group, dict(group))
        restoring.callback(_refill, optimizer.state, states)
        for p in params:
            restoring.callback(setattr, p, "grad", p.grad)
        for tensor in live:
            restoring.callback(_restorer(local(tensor)))
        for tensor in live:  # what the user's code hangs on them
            restoring.callback(refill, vars(tensor), dict(vars(tensor)))
        restoring.enter_context(preserved(model, optimizer))
        if step is not None:
            restoring.enter_context(undone(step, model, optimizer, known=_memory(live)))
        yield


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {memory_of(local(tensor))._cdata for tensor in tensors if tensor.layout == torch.strided}


def _restorer(tensor: Tensor) -> Callable[[], None]:
    """What puts a tensor back: its values, the memory and shape that it had, and how often it was written to.

    The last for who tries things between a forward and its backward, which minds that nobody has written to a tensor.
    """
    version = None if tensor.is_inference() else tensor._version
    return partial(_restore, tensor, tensor.detach(), tensor.detach().to("cpu", copy=True), version)


def _restore(tensor: Tensor, alias: Tensor, copy: Tensor, version: int | None) -> None:
    with torch.no_grad():
        if tensor.layout == torch.strided and not has_memory_of(tensor, alias):
            give_memory_of(tensor, alias)
        tensor.copy_(copy)
    if version is not None and tensor._version != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _refill(live: Any, before: dict[Any, Any]) -> None:
    live.clear()
    live.update(before)


def _tensors(model: nn.Module, params: list[Any], states: dict[Any, dict[str, Any]]) -> list[Tensor]:
    """Every tensor that a step may write to, once."""
    gradients = [p.grad for p in params if p.grad is not None]
    inner = [v for state in states.values() for v in state.values() if isinstance(v, Tensor)]
    return list({id(t): t for t in (*params, *model.buffers(), *gradients, *inner)}.values())
