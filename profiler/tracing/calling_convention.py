"""How a captured step is called: flat inputs from the user's live objects, and everything put back after.

The convention knows nothing of the graph module: any function of the same placeholders and outputs will do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from planner.ir import Role
from profiler.errors import CaptureError
from profiler.tracing.eager_ways.assumptions import Beforehand, BrokenAssumption, are_taken_to_hold
from profiler.tracing.fake_tensors.patches import below_autograd
from profiler.tracing.fx_graphs.typed_graph import Port
from profiler.tracing.guards import Guards
from profiler.tracing.ranks.torch_distributed import distributed, local, spec_of
from profiler.tracing.updates.optimizers import make_lazy_state

# -- where an input is read ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSlot:
    """A parameter of the model, by its first name."""

    name: str
    owner: nn.Module
    key: str

    def find(self) -> Tensor | None:
        """The live parameter, where it is still there."""
        return self.owner._parameters.get(self.key)

    def tensor(self) -> Tensor:
        """The live parameter."""
        param = self.find()
        if param is None:
            raise CaptureError(f"parameter {self.name} is gone from the model: capture again")
        return param


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSlot:
    """A buffer of the model, by its first name."""

    name: str
    owner: nn.Module
    key: str
    persistent: bool = True  # asked where the step itself registers it

    def find(self) -> Tensor | None:
        """The live buffer, where it is still there."""
        return self.owner._buffers.get(self.key)

    def tensor(self) -> Tensor:
        """The live buffer."""
        buffer = self.find()
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
    """A number computed from the learning rate of a parameter group, which is read anew at each call.

    `as_it_is`: for the step itself, not for an op.
    """

    group: int
    text: str
    formula: Callable[[Any], Any] = field(compare=False)
    as_it_is: bool = False

    @property
    def name(self) -> str:
        return f"{self.text}.{self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlot:
    """One tensor of the batch, by its position among the batch's leaves."""

    leaf: int

    @property
    def name(self) -> str:
        return f"batch.{self.leaf}"


InputSlot = ParamSlot | BufferSlot | StateSlot | GradSlot | RateSlot | BatchSlot

_INPUT_ROLES: dict[type, Role | None] = {
    ParamSlot: Role.PARAM,
    BufferSlot: Role.BUFFER,
    StateSlot: Role.OPT_STATE,
    GradSlot: Role.GRADIENT,
    BatchSlot: Role.INPUT,
    RateSlot: None,
}


# -- where an output goes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnOut:
    """A tensor among the leaves of what the step returns."""

    leaf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What the step leaves in an object of the user's: which of all such values, and which leaf of it.

    `as_it_is`: the very tensor that it was given.
    """

    value: int
    leaf: int
    as_it_is: bool


OutputSlot = ReturnOut | GradSlot | BufferSlot | LeftOut

_OUTPUT_ROLES: dict[type, Role] = {
    ReturnOut: Role.OUTPUT,
    LeftOut: Role.OUTPUT,
    GradSlot: Role.GRADIENT,
    BufferSlot: Role.BUFFER,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The shape of what the step returns: a tree, and the leaves of it that are no tensors."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]

    def rebuild(self, tensors: dict[int, Tensor]) -> Any:
        """What the step returns, with `tensors` at their leaves."""
        leaves = [tensors.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        return pytree.tree_unflatten(leaves, self.tree)


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
    beforehand: Beforehand | None = None  # what is checked of values that the step read
    flags_after: tuple[tuple[nn.Module, str, Any], ...] = ()  # attributes of modules that the step leaves so

    @property
    def ports(self) -> tuple[Port, ...]:
        """Name and role of every input, in placeholder order."""
        return tuple(Port(name=slot.name, role=_INPUT_ROLES[type(slot)]) for slot in self.inputs)

    @property
    def output_roles(self) -> tuple[Role, ...]:
        """The role of every output, in their order."""
        return tuple(_OUTPUT_ROLES[type(slot)] for slot in self.outputs)

    @property
    def makes_buffers(self) -> bool:
        """Whether a call registers buffers that are not there, after which the step is another one."""
        return any(isinstance(slot, BufferSlot) and slot.find() is None for slot in self.outputs)

    def check(self, batch: Any) -> list[str]:
        """What no longer matches the captured step; empty where the graph may run."""
        return list(self.guards.mismatches(self.optimizer, batch)) or [str(one) for one in self.broken(batch)]

    def broken(self, batch: Any) -> list[BrokenAssumption]:
        """The reads that now give another value, of those that are checked beforehand; only where all else matches."""
        if self.beforehand is None or are_taken_to_hold():
            return []
        leaves = pytree.tree_leaves(batch)
        return self.beforehand.broken(lambda i: local(self._read(self.inputs[i], leaves)))

    def call(self, function: Callable[..., Sequence[Tensor]], batch: Any) -> Any:
        """Run `function` as the step, on live state; CaptureError if the step is not the captured one."""
        wrong = list(self.guards.mismatches(self.optimizer, batch))
        if not wrong and (broken := self.broken(batch)):
            raise broken[0]
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            raise CaptureError(f"not the captured step any more: {'; '.join(wrong[:5])}{more}: capture again")
        return self.run(function, batch)

    def run(self, function: Callable[..., Sequence[Tensor]], batch: Any) -> Any:
        """`call` without its check, for who has just checked."""
        made = self.make_state()
        flat = self.gather(batch)
        try:
            with below_autograd():
                outputs = _unhooked(function)(*flat)
        except BrokenAssumption:  # the graph has put back what it wrote
            for p, state in made.items():
                _refill(self.optimizer.state, p, state)
            raise
        return self.finish(outputs)

    def gather(self, batch: Any) -> list[Any]:
        """The flat inputs, in placeholder order; frees the `.grad`s that the step would clear unread."""
        self.make_state()
        leaves = pytree.tree_leaves(batch)
        flat = [local(self._read(slot, leaves)) for slot in self.inputs]
        for param in self.dropped:
            param.tensor().grad = None
        return flat

    def finish(self, outputs: Sequence[Tensor]) -> Any:
        """Leave everything as eager would have; the return value of the step."""
        returned: dict[int, Tensor] = {}
        left: defaultdict[int, dict[int, Any]] = defaultdict(dict)
        for slot, tensor in zip(self.outputs, outputs, strict=True):
            match slot:
                case ReturnOut():
                    returned[slot.leaf] = tensor
                case LeftOut():
                    is_live = isinstance(tensor, Tensor) and tensor.requires_grad and not slot.as_it_is
                    left[slot.value][slot.leaf] = tensor.data if is_live else tensor
                case GradSlot():
                    live = slot.param.tensor()
                    # Not as a view of what it was computed in: eager's is none, and `model.double()` minds.
                    live.grad = distributed(tensor.data if tensor._is_view() else tensor, spec_of(live))
                case BufferSlot():
                    if slot.key not in slot.owner._buffers and not slot.persistent:
                        slot.owner._non_persistent_buffers_set.add(slot.key)
                    slot.owner._buffers[slot.key] = tensor
        for param in self.cleared:
            param.tensor().grad = None
        for module, training in self.training_after:
            module.training = training
        for module, name, value in self.flags_after:
            setattr(module, name, value)
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask for it
        self.guards.left.put(left)
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
                if not slot.as_it_is and not isinstance(rate, (int, float)):
                    rate = float(rate)  # numpy's: as ops read them
                return slot.formula(rate)
            case BatchSlot():
                return leaves[slot.leaf]

    def make_state(self) -> dict[Tensor, dict[str, Any] | None]:
        """The optimizer's lazy state, as its own first step would make it; what was there before of each parameter."""
        state = self.optimizer.state
        slots = [slot for slot in self.inputs if isinstance(slot, StateSlot)]
        lacking = [s.param.tensor() for s in slots if state.get(s.param.tensor(), {}).get(s.key) is None]
        before = {p: dict(state[p]) if p in state else None for p in lacking}
        if lacking:
            make_lazy_state(self.optimizer, lacking)
        return before


def _unhooked(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a graph computes, past the hooks that the user has on all modules: they are in it."""
    return function.forward if isinstance(function, nn.Module) else function


def _refill(states: Any, p: Tensor, before: dict[str, Any] | None) -> None:
    """What the optimizer had of a parameter is what it has again."""
    if before is None:
        del states[p]
    else:
        states[p].clear()
        states[p].update(before)
