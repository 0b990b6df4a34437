"""What an optimizer takes of memory beside the model: its state, and what its step allocates for a moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from planner.units import human_bytes
from profiler.measuring.meters import Watch, meter_for
from profiler.tracing.guards import only_watches
from profiler.tracing.joint import given, in_backward
from profiler.tracing.ranks.torch_distributed import local
from profiler.tracing.updates.optimizers import first_state
from profiler.workload import device_of
from rewriter.budgets import OverBudget
from rewriter.ways.common import ModelSettings
from rewriter.ways.company import others_bytes
from rewriter.ways.rehearsal import stop_watching


class OptimizerSteps:
    """Watches the first step of whichever optimizer steps a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._watch: Watch | None = None
        self._is_enough = False
        self._were_outgrown = False
        self.seen = 0  # how many there were, up to the first that could be watched
        self.for_a_moment_bytes = 0  # what a step allocates and lets go
        handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]
        self.close = weakref.finalize(model, _remove, handles)  # look no more; at the latest once the model is gone

    def forward_begins(self) -> None:
        """Where a step was seen, that is enough; one with a forward inside (LBFGS) is no bound of anything."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            self._is_enough = True
        if self._is_enough:
            self.close()  # not in a hook: torch is going through them then

    def outgrow(self, settings: ModelSettings) -> bool:
        """Whether plans so far had more room than there is now: true once, after an unannounced optimizer's first."""
        if not self.seen or self._were_outgrown:
            return False
        self._were_outgrown = True
        return settings.in_bytes and settings.optimizer is None

    def check_fits(self, batch: Any, *, total_bytes: int, elsewhere_bytes: int) -> None:
        """OverBudget where the optimizer's own step does not fit beside what is live then; no plan can help it."""
        model = self._model()
        assert model is not None
        start_bytes, gradients = nbytes_of(given(model, batch)), gradient_bytes(model)
        peak = elsewhere_bytes + start_bytes + gradients + self.for_a_moment_bytes
        if peak <= total_bytes:
            return
        raise OverBudget(
            f"the optimizer's own step does not fit {human_bytes(total_bytes)}: {human_bytes(peak)} = model and batch "
            f"{human_bytes(start_bytes)}, gradients {human_bytes(gradients)}, other tensors (the optimizer's state "
            f"among them) {human_bytes(elsewhere_bytes)}, and {human_bytes(self.for_a_moment_bytes)} that the step "
            "allocates for a moment. No plan of the model changes that: a fused or foreach=False optimizer, or one "
            "that steps inside of the backward, needs less; the step door's early_updates too"
        )

    @only_watches
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        model = self._model()
        if self._is_enough or model is None or self._watch is not None or in_backward():
            return
        if self._steps(optimizer, model):
            stop_watching()
            self._watch = meter_for(device_of(model)).watch()

    @only_watches
    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        model = self._model()
        if self._is_enough or model is None or not self._steps(optimizer, model):
            return
        self.seen += 1
        watch, self._watch = self._watch, None
        if watch is not None:
            for span in watch.spans():  # none where somebody else's look at the allocator cut this one short
                self.for_a_moment_bytes = span.peak_bytes - max(span.before_bytes, span.after_bytes)
                self._is_enough = True

    @staticmethod
    def _steps(optimizer: Optimizer, model: nn.Module) -> bool:
        own = {id(p) for p in model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """What tensors take, memory that they share once."""
    parts = [local(t) for t in tensors if t.layout == torch.strided]
    storages = {part.untyped_storage()._cdata: part.untyped_storage() for part in parts}
    return sum(storage.nbytes() for storage in storages.values())


def missing_state_bytes(optimizer: Optimizer) -> int:
    """What the state will take that an optimizer has not made yet."""
    there = {p: dict(state) for p, state in optimizer.state.items()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = first_state(optimizer, optimizer.param_groups, optimizer.state)
    return sum(
        local(leaf).untyped_storage().nbytes()
        for p, state in made.items()
        for key, value in state.items()
        if key not in there.get(p, {})
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    )


def elsewhere_bytes(model: nn.Module, batch: Any, optimizer: Optimizer | None) -> int:
    """What is taken by tensors that are no part of the model's step: optimizer state, made or not yet, others.

    Without what planned forwards hold that have not gone backward.
    """
    to_come = 0 if optimizer is None else missing_state_bytes(optimizer)
    return others_bytes(device_of(model), without=given(model, batch)) + to_come


def gradient_bytes(model: nn.Module) -> int:
    """What gradients will take that are not there yet."""
    missing = [local(p) for p in model.parameters() if p.requires_grad and p.grad is None]
    return sum(part.numel() * part.element_size() for part in missing)
