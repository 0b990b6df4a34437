"""How a captured step is called: flat inputs from the user's live objects, and everything put back after.

The convention knows nothing of the graph module: any function of the same placeholders and outputs will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from planner.ir import Role
from profiler.errors import CaptureError
from profiler.optimizers import make_lazy_state

# -- where an input is read ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlot:
    """A parameter of the model, by its first name."""

    name: str
    owner: nn.Module
    key: str

    def tensor(self) -> Tensor:
        """The live parameter."""
        param = self.owner._parameters[self.key]
        if param is None:
            raise CaptureError(f"parameter {self.name} is gone from the model: capture again")
        return param


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSlot:
    """A buffer of the model, by its first name."""

    name: str
    owner: nn.Module
    key: str

    def tensor(self) -> Tensor:
        """The live buffer."""
        buffer = self.owner._buffers[self.key]
        if buffer is None:
            raise CaptureError(f"buffer {self.name} is gone from the model: capture again")
        return buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """One tensor of the optimizer's state of one parameter."""

    param: ParamSlot
    key: str

    @property
    def name(self) -> str:
        return f"{self.param.name}.{self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradSlot:
    """The `.grad` that a parameter has when the step begins."""

    param: ParamSlot

    @property
    def name(self) -> str:
        return f"{self.param.name}.grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSlot:
    """The learning rate of a parameter group, a Python number read anew at each call."""

    group: int
    negated: bool

    @property
    def name(self) -> str:
        return f"{'minus_' if self.negated else ''}lr.{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """One tensor of the batch, by its position among the batch's leaves."""

    leaf: int

    @property
    def name(self) -> str:
        return f"batch.{self.leaf}"


InputSlot = ParamSlot | BufferSlot | StateSlot | GradSlot | RateSlot | BatchSlot

ROLES: dict[type, Role] = {
    ParamSlot: Role.PARAM,
    BufferSlot: Role.BUFFER,
    StateSlot: Role.OPT_STATE,
    GradSlot: Role.GRADIENT,
    BatchSlot: Role.INPUT,
}


# -- where an output goes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOut:
    """A tensor among the leaves of what the step returns."""

    leaf: int


OutputSlot = ReturnOut | GradSlot | BufferSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The shape of what the step returns: a tree, and the leaves of it that are no tensors."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: dict[int, Tensor]) -> Any:
        """What the step returns, with `tensors` at their leaves."""
        leaves = [tensors.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(leaves, self.tree)


# -- what must stay as it was at capture --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the graph assumes of an input tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The specification that `tensor` meets."""
        return TensorSpec(shape=tuple(tensor.shape), stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} stride {list(self.stride)} on {self.device}"


@dataclass(frozen=True, kw_only=True)
class Guards:
    """What the graph has baked in. `mismatches` says what no longer holds."""

    batch_tree: pytree.TreeSpec
    batch_leaves: tuple[Any, ...]  # a TensorSpec, or the Python value itself
    tensors: tuple[tuple[ParamSlot | BufferSlot, TensorSpec, bool], ...]
    training: tuple[tuple[str, nn.Module, bool], ...]
    groups: tuple[tuple[Tensor, ...], ...]
    numbers: tuple[tuple[int, str, Any], ...]
    gradients: tuple[tuple[ParamSlot, bool], ...]
    traced_optimizer: bool

    def mismatches(self, optimizer: Optimizer, batch: Any) -> Iterator[str]:
        """What differs from the captured step, one sentence each."""
        yield from self._batch_mismatches(batch)
        for slot, spec, requires_grad in self.tensors:
            now = slot.tensor()
            if TensorSpec.of(now) != spec:
                yield f"{slot.name} was {spec} and is {TensorSpec.of(now)}"
            if now.requires_grad != requires_grad:
                yield f"{slot.name}.requires_grad was {requires_grad} and is {now.requires_grad}"
        for path, module, training in self.training:
            if module.training != training:
                yield f"module {path or 'model'}.training was {training} and is {module.training}"
        yield from self._group_mismatches(optimizer)
        if self.traced_optimizer:
            yield from _untraced(optimizer)
        for param, present in self.gradients:
            if (param.tensor().grad is not None) != present:
                yield f"{param.name}.grad was {'a tensor' if present else 'None'} when the step began"

    def _batch_mismatches(self, batch: Any) -> Iterator[str]:
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self.batch_tree:
            yield f"the batch was a {self.batch_tree} and is a {tree}"
            return
        for i, (leaf, spec) in enumerate(zip(leaves, self.batch_leaves, strict=True)):
            now = TensorSpec.of(leaf) if isinstance(leaf, Tensor) else leaf
            if type(now) is not type(spec) or now != spec:
                yield f"batch leaf {i} was {spec} and is {now}"

    def _group_mismatches(self, optimizer: Optimizer) -> Iterator[str]:
        if len(optimizer.param_groups) != len(self.groups):
            yield f"the optimizer had {len(self.groups)} parameter groups and has {len(optimizer.param_groups)}"
            return
        for i, (group, params) in enumerate(zip(optimizer.param_groups, self.groups, strict=True)):
            if len(group["params"]) != len(params) or any(
                a is not b for a, b in zip(group["params"], params, strict=True)
            ):
                yield f"the parameters of optimizer group {i} are not those of the captured step"
        for i, key, value in self.numbers:
            now = optimizer.param_groups[i].get(key)
            if type(now) is not type(value) or now != value:
                yield f"{key!r} of optimizer group {i} was {value!r} and is {now!r}"


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run ops without recording them, and yet as in training.

    Not `no_grad`: some kernels (mkldnn's recurrent layer) ask for the mode and then leave out what the backward
    needs. Graphs are run, timed and rewritten under this.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _untraced(optimizer: Optimizer) -> Iterator[str]:
    """What an optimizer inside the graph cannot have, and may have been given since."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield "the optimizer was given a step hook"
    for i, group in enumerate(optimizer.param_groups):
        if not isinstance(group["lr"], (int, float)):
            yield f"the learning rate of optimizer group {i} was a number and is a {type(group['lr']).__name__}"


# -- the convention -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Convention:
    """Calls any graph of the captured step's inputs and outputs on the user's own objects."""

    model: nn.Module
    optimizer: Optimizer
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    cleared: tuple[ParamSlot, ...]  # `.grad` is None after the step
    dropped: tuple[ParamSlot, ...]  # the `.grad` it begins with is never read
    result: Result
    training_after: tuple[tuple[nn.Module, bool], ...]
    guards: Guards

    def check(self, batch: Any) -> list[str]:
        """What no longer matches the captured step; empty where the graph may run."""
        return list(self.guards.mismatches(self.optimizer, batch))

    def call(self, function: Callable[..., Sequence[Tensor]], batch: Any) -> Any:
        """Run `function` as the step, on live state; CaptureError if the step is not the captured one."""
        wrong = self.check(batch)
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            raise CaptureError(f"not the captured step any more: {'; '.join(wrong[:5])}{more}: capture again")
        return self.run(function, batch)

    def run(self, function: Callable[..., Sequence[Tensor]], batch: Any) -> Any:
        """`call` without its check, for who has just checked."""
        flat = self.gather(batch)
        with below_autograd():
            outputs = function(*flat)
        return self.finish(outputs)

    def gather(self, batch: Any) -> list[Any]:
        """The flat inputs, in placeholder order; frees the `.grad`s that the step would clear unread."""
        self._make_state()
        leaves = pytree.tree_leaves(batch)
        flat = [self._read(slot, leaves) for slot in self.inputs]
        for param in self.dropped:
            param.tensor().grad = None
        return flat

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Leave everything as eager would have; the return value of the step."""
        returned: dict[int, Tensor] = {}
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            match slot:
                case ReturnOut():
                    returned[slot.leaf] = tensor
                case GradSlot():
                    slot.param.tensor().grad = tensor
                case BufferSlot():
                    slot.owner._buffers[slot.key] = tensor
        for param in self.cleared:
            param.tensor().grad = None
        for module, training in self.training_after:
            module.training = training
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        return self.result.rebuild(returned)

    def _read(self, slot: InputSlot, leaves: Sequence[Any]) -> Any:
        match slot:
            case ParamSlot() | BufferSlot():
                return slot.tensor()
            case StateSlot():
                state = self.optimizer.state[slot.param.tensor()].get(slot.key)
                if state is None:
                    raise CaptureError(f"the optimizer has lost its state {slot.name}: capture again")
                return state
            case GradSlot():
                return slot.param.tensor().grad
            case RateSlot():
                rate = self.optimizer.param_groups[slot.group]["lr"]
                return -rate if slot.negated else rate
            case BatchSlot():
                return leaves[slot.leaf]

    def _make_state(self) -> None:
        state = self.optimizer.state
        slots = [slot for slot in self.inputs if isinstance(slot, StateSlot)]
        lacking = [s.param.tensor() for s in slots if state.get(s.param.tensor(), {}).get(s.key) is None]
        if lacking:
            make_lazy_state(self.optimizer, lacking)
