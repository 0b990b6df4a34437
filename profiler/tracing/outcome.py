"""What a traced step left behind, and the convention by which its graph is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.calling_convention import (
    BatchSlot,
    Convention,
    GradSlot,
    InputSlot,
    LeftOut,
    OutputSlot,
    ParamSlot,
    Result,
    ReturnOut,
)
from profiler.tracing.eager_ways.live_numbers import LIVE
from profiler.tracing.fake_tensors.placed import Placed, ProbesReadError, numbers_of
from profiler.tracing.guards import (
    PLAIN,
    Autocast,
    BatchGuard,
    Fixed,
    Guard,
    Guards,
    Held,
    Left,
    LeftBehind,
    ModuleGuard,
    Modules,
    Noted,
    OptimizerGuard,
    Switches,
    TensorGuard,
    attributes_of,
)
from profiler.tracing.guards.holders import STAND_INS, is_of_the_trace
from profiler.tracing.ranks.torch_distributed import is_distributed


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one traced call of the step left behind."""

    outputs: tuple[OutputSlot, ...]
    tensors: list[Any]  # of live numbers their proxies
    cleared: tuple[ParamSlot, ...]
    overwritten: tuple[ParamSlot, ...]
    result: Result
    training_after: tuple[tuple[nn.Module, bool], ...]
    left: tuple[Left, ...]


def collect(placed: Placed, result: Any, training: list[tuple[nn.Module, bool]], held: Held) -> Outcome:
    """What the step returned and changed; `training` are the modes before it. CaptureError where no graph can do so."""
    leaves, tree = pytree.tree_flatten(result)
    outputs = _returned(placed, leaves)
    cleared, overwritten = [], []
    for param in placed.stand_ins.params.values():
        grad, incoming = placed.args[param].grad, placed.args.get(GradSlot(param=param))
        if grad is not None and grad is not incoming:
            outputs[GradSlot(param=param)] = grad
        if grad is None and placed.args[param].requires_grad:
            cleared.append(param)
        if grad is not incoming:
            overwritten.append(param)
    outputs |= _rebound_buffers(placed)
    left = _left_in_objects(placed, held, outputs)
    _check_left_behind(placed)
    return Outcome(
        outputs=tuple(outputs),
        tensors=list(outputs.values()),
        cleared=tuple(cleared),
        overwritten=tuple(overwritten),
        result=Result(
            tree=tree,
            leaves=tuple(None if ReturnOut(leaf=i) in outputs else leaf for i, leaf in enumerate(leaves)),
        ),
        training_after=tuple((m, m.training) for m, before in training if m.training != before),
        left=left,
    )


def _returned(placed: Placed, leaves: list[Any]) -> dict[OutputSlot, Any]:
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN, *LIVE)):
            raise CaptureError(
                f"the step returns a {type(leaf).__name__}: return tensors and numbers, in tuples or dicts"
            )
    found: dict[OutputSlot, Any] = {}
    for i, leaf in enumerate(leaves):
        if is_distributed(leaf):
            raise CaptureError(
                "the step returns a distributed tensor, of which each process has a part: return `.full_tensor()` of it"
            )
        if isinstance(leaf, LIVE):
            found[ReturnOut(leaf=i)] = fx.Proxy(leaf.source, placed.tracer)
        elif isinstance(leaf, Tensor) and get_proxy_slot(leaf, placed.tracer, None) is not None:
            found[ReturnOut(leaf=i)] = leaf
    return found


def _left_in_objects(placed: Placed, held: Held, outputs: dict[OutputSlot, Any]) -> tuple[Left, ...]:
    """What the step put into places that a call can fill, too; what is computed of it joins the outputs."""
    found: list[Left] = []
    given = {id(tensor) for tensor in placed.args.values()}
    for holder, key, value in held.written():
        leaves, tree = pytree.tree_flatten(value)
        if not all(_can_be_put(placed, leaf) for leaf in leaves):
            continue
        computed = {i for i, leaf in enumerate(leaves) if isinstance(leaf, STAND_INS)}
        for i in computed:
            slot = LeftOut(value=len(found), leaf=i, as_it_is=id(leaves[i]) in given)
            outputs[slot] = fx.Proxy(leaves[i].source, placed.tracer) if isinstance(leaves[i], LIVE) else leaves[i]
        kept = tuple(None if i in computed else leaf for i, leaf in enumerate(leaves))
        found.append(Left(holder=holder, key=key, tree=tree, leaves=kept, computed=dict.fromkeys(computed, "")))
    return tuple(found)


def _can_be_put(placed: Placed, leaf: Any) -> bool:
    if isinstance(leaf, FakeTensor):
        return get_proxy_slot(leaf, placed.tracer, None) is not None
    return isinstance(leaf, LIVE) or not (is_distributed(leaf) or is_of_the_trace(leaf))


def _rebound_buffers(placed: Placed) -> dict[OutputSlot, Any]:
    """Buffers that the step replaced by new tensors (`self.mean = ...`) or made: outputs, put back at each call."""
    rebound: dict[OutputSlot, Any] = {}
    for buffer in placed.stand_ins.buffers.values():
        now = buffer.owner._buffers.get(buffer.key)
        if now is not None and now is not placed.args[buffer]:
            rebound[buffer] = now
    return rebound | placed.new_buffers()


def _check_left_behind(placed: Placed) -> None:
    for param in placed.stand_ins.params.values():
        if param.owner._parameters.get(param.key) is not placed.args[param]:
            raise CaptureError(f"the step puts another tensor in place of parameter {param.name}")
        if placed.args[param].requires_grad != placed.trained[param]:
            raise CaptureError(f"the step changes requires_grad of parameter {param.name}: do so outside of it")
    if new := placed.new_parts():
        raise CaptureError(
            f"the step registers {' and '.join(new[:3])} with the model: run one step of your own before this call, or "
            "make what it registers when the model is made"
        )
    if states := placed.other_states():
        raise CaptureError(
            f"the step itself writes the optimizer's state {' and '.join(states[:3])}: keep it in a buffer of the "
            "model (register_buffer), or in an object of your own"
        )
    for slot, tensor in placed.args.items():
        if isinstance(slot, BatchSlot) and attributes_of(tensor).keys() - attributes_of(placed.live(slot)).keys():
            raise CaptureError(
                f"the step sets an attribute on the tensor {slot.name}: return it from the step, or keep it elsewhere"
            )
        if isinstance(slot, BatchSlot) and tensor.grad is not None:
            raise CaptureError(
                f"the step leaves a .grad on {slot.name}: clear it before the step ends, or use "
                "torch.autograd.grad for gradients of the batch"
            )
    for i, (group, before) in enumerate(zip(placed.optimizer.param_groups, placed.group_numbers, strict=True)):
        if numbers_of(group) != before:
            raise CaptureError(f"the step changes optimizer group {i} (its rate, ...): do so outside of it")


# -- from the raw graph to one with live inputs -------------------------------------------------------------------


def keep_used_inputs(placed: Placed, module: fx.GraphModule, slots: list[InputSlot]) -> list[InputSlot]:
    """The inputs without those stand-ins that nobody reads, in the graph too."""
    kept: list[InputSlot] = []
    for slot, node in zip(slots, module.graph.find_nodes(op="placeholder"), strict=True):
        if not node.users and (isinstance(slot, GradSlot) or slot in placed.stand_ins.lazy):
            module.graph.erase_node(node)
            node.meta.clear()  # its stand-in is nowhere then; to ask who holds hundreds of them takes seconds
        elif isinstance(slot, GradSlot) and slot in placed.stand_ins.lazy:
            raise ProbesReadError
        else:
            kept.append(slot)
    return kept


def convention_of(
    placed: Placed,
    slots: tuple[InputSlot, ...],
    outcome: Outcome,
    held: Held,
    noted: Noted | None,
    *,
    names: Sequence[str],
    beside: tuple[Guard, ...] = (),
    opaque_reason: str,
) -> Convention:
    """How the graph of these inputs is called on the user's own objects, and what must hold for that.

    `names` are what two traces have in common of the outputs; `beside` are guards of whatever else the graph was traced
    with.
    """
    read = {slot.param for slot in slots if isinstance(slot, GradSlot)}
    return Convention(
        model=placed.model,
        optimizer=placed.optimizer,
        inputs=slots,
        outputs=outcome.outputs,
        cleared=outcome.cleared,
        dropped=tuple(param for param in outcome.overwritten if param not in read),
        result=outcome.result,
        training_after=outcome.training_after,
        guards=_guards(placed, read, held, noted, beside, _left_behind(outcome, names), opaque_reason=opaque_reason),
    )


def _left_behind(outcome: Outcome, names: Sequence[str]) -> LeftBehind:
    by_slot = dict(zip(outcome.outputs, names, strict=True))
    computed = [dict(left.computed) for left in outcome.left]
    for slot, name in by_slot.items():
        if isinstance(slot, LeftOut):
            computed[slot.value][slot.leaf] = name
    return LeftBehind([replace(left, computed=of) for left, of in zip(outcome.left, computed, strict=True)])


def _guards(
    placed: Placed,
    read: set[ParamSlot],
    held: Held,
    noted: Noted | None,
    around: tuple[Guard, ...],
    left: LeftBehind,
    *,
    opaque_reason: str,
) -> Guards:
    groups = placed.optimizer.param_groups
    baked = set(placed.outside_reads)
    if not opaque_reason:
        baked |= {(i, key) for i, group in enumerate(groups) for key in numbers_of(group) if key != "lr"}
    named = [(slot, slot.tensor()) for slot in placed.stand_ins.named()]
    beside = held.tensors(without=[tensor for _, tensor in named])
    return Guards(
        batch=BatchGuard.of(
            pytree.tree_unflatten(placed.stand_ins.batch_leaves, placed.stand_ins.batch_tree),
            unread=frozenset() if noted is None else noted.unread,
            names=held.names,
        ),
        surroundings=(
            *Autocast.now(tensor.device.type for tensor in placed.stand_ins.inputs.values()),
            Switches.now(),
            Modules(
                [ModuleGuard.of(path, module) for path, module in held.modules()],
                [TensorGuard.of(slot, tensor) for slot, tensor in named]
                + [TensorGuard.of(Fixed(name=path, held=tensor), tensor) for path, tensor in beside],
            ),
            held,
            left,
            *around,
        ),
        optimizer=OptimizerGuard.of(placed.optimizer, baked=baked, traced=not opaque_reason),
        gradients=tuple(
            (p, p in read) for p in placed.stand_ins.params.values() if p in read or p in placed.stand_ins.absent
        ),
        changes=held.changes,
        once=held.once,
        trials=held.trials,
        watch_also=held.watch_also,
        left=left,
    )
