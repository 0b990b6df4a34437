"""What a step calls while it is traced: backward passes, whose gradients are noted, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import GradSlot, ParamSlot, StateSlot
from profiler.tracing.fake_tensors.placed import Placed
from profiler.tracing.fx_graphs.provenance import GRADIENT_OF, Stamper
from profiler.tracing.guards import Autocast
from profiler.tracing.ranks.parallel import Parallel
from profiler.tracing.ranks.torch_distributed import local
from profiler.tracing.updates.learning_rates import Rate, RatesKept
from profiler.tracing.updates.optimizers import OpaqueStep


class UntraceableOptimizerError(Exception):
    """The optimizer failed to trace: run it opaquely."""


class Passes:
    """Stands in for autograd's entries and for `optimizer.step`."""

    def __init__(self, placed: Placed, stamper: Stamper, parallel: Parallel, *, opaque_reason: str) -> None:
        self.placed = placed
        self.parallel = parallel
        self.stand_ins = placed.stand_ins
        self.optimizer = placed.optimizer
        self.stamper = stamper
        self.opaque_reason = opaque_reason
        self.stepped_groups: set[int] = set()
        self.stepping = False  # whether the optimizer is stepped by its own `step`

    # -- backward -------------------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self, accumulates: bool) -> Iterator[None]:
        """Inside, a backward pass runs."""
        if accumulates:
            self._remove_probes()
        with self.stamper.backward(), self.parallel.backward(accumulates):
            yield
        if accumulates:
            self._note_gradients()

    def _remove_probes(self) -> None:
        """The step reaches a `.grad` that it has not cleared: from here on it is what eager has."""
        for slot in self.stand_ins.lazy:
            if isinstance(slot, GradSlot) and self.placed.args[slot.param].grad is self.placed.args[slot]:
                self.placed.args[slot.param].grad = None
                self.stand_ins.absent.add(slot.param)

    def _note_gradients(self) -> None:
        for param in self.stand_ins.params.values():
            grad = self.placed.args[param].grad
            if grad is not None and grad is not self.placed.args.get(GradSlot(param=param)):
                self._note_gradient(param, grad)

    def note_returned(self, inputs: Any, gradients: Any) -> None:
        """These are the gradients that torch.autograd.grad gave."""
        inputs = [inputs] if isinstance(inputs, Tensor) else inputs
        for tensor, gradient in zip(inputs, gradients, strict=False):
            slot = self.placed.by_stand_in.get(id(tensor)) or self.stand_ins.params.get(id(tensor))
            if slot is not None and gradient is not None:
                self._note_gradient(slot, gradient)

    def _note_gradient(self, param: ParamSlot, gradient: Tensor) -> None:
        slot = get_proxy_slot(local(gradient), self.placed.tracer, None)
        if slot is not None:
            slot.proxy.node.meta[GRADIENT_OF] = param.name

    # -- the optimizer --------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """What `optimizer.step()` does while the step is traced."""
        if closure is not None:
            raise CaptureError("optimizer.step(closure) evaluates the loss anew: call it without a closure")
        self._remove_probes()
        with self.stamper.optimizer():
            self._note_gradients()
            stepped = [
                [self.placed.by_stand_in[id(p)] for p in dict.__getitem__(group, "params") if p.grad is not None]
                for group in self.optimizer.param_groups
            ]
            self.stepped_groups.update(i for i, slots in enumerate(stepped) if slots)
            if self.opaque_reason:
                self._record_opaque_step([slot for slots in stepped for slot in slots])
            else:
                self._trace_step()

    def _trace_step(self) -> None:
        groups: list[Any] = self.optimizer.param_groups
        saved = [dict.__getitem__(group, "lr") for group in groups]
        self.stepping = True
        try:
            for i, group in enumerate(groups):
                group.watching = False
                group["lr"] = Rate.of(i, saved[i])
            with RatesKept(self.placed.tracer.graph):
                type(self.optimizer).step(self.optimizer)
        except Exception as error:
            raise UntraceableOptimizerError(f"{type(error).__name__}: {error}") from error
        finally:
            self.stepping = False
            for group, rate in zip(groups, saved, strict=True):
                group["lr"] = rate
                group.watching = True

    def _record_opaque_step(self, slots: list[ParamSlot]) -> None:
        known = set(slots)
        state = [s for s in self.placed.args if isinstance(s, StateSlot) and s.param in known]
        everyone = [self.placed.by_stand_in[id(p)] for g in self.optimizer.param_groups for p in g["params"]]
        autocast = Autocast.now(self.placed.args[slot].device.type for slot in everyone)
        target = OpaqueStep(self.optimizer, receivers=slots, everyone=everyone, autocast=autocast)
        args = (
            [self.placed.node(self.placed.args[slot]) for slot in slots],
            [self.placed.node(self.placed.args[slot].grad) for slot in slots],
            [self.placed.node(self.placed.args[slot]) for slot in state],
        )
        node = self.placed.tracer.create_node("call_function", target, args, {}, name="optimizer_step")
        node.meta["val"] = None
