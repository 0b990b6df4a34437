"""From the user's own `train_step(model, optimizer, batch)` to one graph of the whole step."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.optim import LBFGS, Optimizer
from torch.utils import _pytree as pytree

from planner.ir import Graph
from profiler.errors import CaptureError
from profiler.ops import own_generators, storage_root, written
from profiler.tracing import early_updates as updates
from profiler.tracing.audit import OpSeen, ops_of
from profiler.tracing.calling import BatchSlot, Convention
from profiler.tracing.cleaning import clean
from profiler.tracing.gpu_kernels import GpuKernels, Substitution, Target, as_on_gpu
from profiler.tracing.joint import ForwardAndBackward
from profiler.tracing.session import trace_step
from profiler.tracing.typed_graph import lift
from profiler.tracing.without_memory import fake_mode_of, made_without_memory
from profiler.workload import TrainStep, Workload, with_stand_in_optimizer

log = logging.getLogger("recompute_planner")


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One training step as a graph that computes eager's own bits.

    `nodes[op.id]` and `value_nodes[value.id]` are the fx nodes of `graph`'s ops and values, under the same
    names. `gradients` maps a parameter's name to the value that last holds its gradient before the optimizer
    steps. `opaque_reason` is "" where the optimizer is inside the graph. `planning_only` says why the step cannot
    be run here, and is "" where it can; `substitutions` are the kernels of another device in it, `unknown` what of
    them is not known.
    """

    graph: Graph
    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node, ...]
    convention: Convention
    gradients: Mapping[str, int]
    opaque_reason: str
    raw_ops: tuple[OpSeen, ...] = ()  # as they came from the tracer
    planning_only: str = ""
    substitutions: tuple[Substitution, ...] = ()
    unknown: tuple[str, ...] = ()

    def check_runnable(self) -> None:
        """CaptureError where this step is for planning only; whoever measures, rewrites or runs a step asks first."""
        if self.planning_only:
            raise CaptureError(f"{self.graph.name} was captured for planning and cannot be run: {self.planning_only}")

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The user's own generators that the step draws from."""
        return tuple({id(g): g for node in self.nodes for g in own_generators(node)}.values())

    def written_outside(self, batch: Any) -> tuple[Tensor, ...]:
        """What the step writes to that is neither the model's nor the optimizer's: the batch, an average of weights."""
        roots = {storage_root(n) for node in self.nodes for n in written(node)}
        slots = dict(zip(self.module.graph.find_nodes(op="placeholder"), self.convention.inputs, strict=True))
        leaves, found = pytree.tree_leaves(batch), list[Tensor]()
        for root in sorted(roots, key=lambda node: node.name):
            slot = slots.get(root)
            if isinstance(slot, BatchSlot):
                found.append(leaves[slot.leaf])
            elif root.op == "get_attr":
                found.append(getattr(self.module, str(root.target)))
        return tuple(found)

    def run(self, batch: Any) -> Any:
        """One step of the captured graph, on the user's live model and optimizer."""
        self.check_runnable()
        return self.convention.call(self.module, batch)


def capture(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer | None,
    batch: Any,
    *,
    name: str = "",
    free_gradients: bool = False,
    early_updates: bool = False,
    optimizer_outside: bool = False,
    target: Target | None = None,
) -> TracedStep:
    """One graph of `train_step(model, optimizer, batch)`, or CaptureError; the user's objects stay as they are.

    The step's Python runs once, here, on stand-ins: what it prints or counts happens now and never again.
    `free_gradients` ends the step with every `.grad` at None. `early_updates` applies each parameter's update as
    soon as its gradient is complete; it needs the optimizer inside the graph. `optimizer_outside` runs it as itself
    instead, so that all of its numbers may change between steps. Fake tensors (`without_memory`) and a `target` give
    a step for planning only: with the latter its kernels are those that GPU would run, where known. Without an
    optimizer (None) the step is forward and backward: it leaves gradients in `.grad`, as eager does, and nothing else.
    """
    started = time.perf_counter()
    train_step, optimizer = with_stand_in_optimizer(train_step, optimizer)
    _refuse_hidden(train_step, model)
    if isinstance(optimizer, LBFGS):
        raise CaptureError(
            "LBFGS evaluates the loss anew inside its step, which is not one graph: plan forward and backward only, "
            "step = checkpoint(forward_backward, model, None, batch, ...), and call step(batch) in its closure"
        )
    kernels = None if target is None else GpuKernels(target)
    trace = trace_step(train_step, model, optimizer, batch, optimizer_outside=optimizer_outside, kernels=kernels)
    raw_ops = ops_of(trace.module.graph)
    _refuse_communication(trace.module.graph)
    clean(trace.module)
    convention = trace.convention
    if free_gradients:
        convention = updates.free_gradients(trace.module, convention)
    if early_updates:
        if trace.opaque_reason:
            raise CaptureError(f"early updates need the optimizer inside the graph: {trace.opaque_reason}")
        updates.update_early(trace.module)
    lifted = lift(trace.module, convention.ports, convention.output_roles, name=name or type(model).__name__)
    log.info(
        "captured %s in %.2f s: %d ops, %d storages%s",
        lifted.graph.name,
        time.perf_counter() - started,
        len(lifted.graph.ops),
        len(lifted.graph.storages),
        f"; no optimizer in the graph: {trace.opaque_reason}" if trace.opaque_reason else "",
    )
    return TracedStep(
        graph=lifted.graph if kernels is None else as_on_gpu(lifted.graph),
        module=trace.module,
        nodes=lifted.nodes,
        value_nodes=lifted.value_nodes,
        convention=convention,
        gradients=lifted.gradients,
        opaque_reason=trace.opaque_reason,
        raw_ops=raw_ops,
        planning_only=_why_planning_only(model, target),
        substitutions=() if kernels is None else kernels.substitutions,
        unknown=() if kernels is None else kernels.unknown,
    )


def traced_ops(workload: Workload, *, optimizer_outside: bool) -> tuple[OpSeen, ...]:
    """The ops of one more trace of the step."""
    train_step, optimizer = with_stand_in_optimizer(workload.train_step, workload.optimizer)
    again = trace_step(train_step, workload.model, optimizer, workload.batch, optimizer_outside=optimizer_outside)
    return ops_of(again.module.graph)


def capture_without_memory(
    make: Callable[[int], tuple[TrainStep, nn.Module, Optimizer | None, Any]],
    batch_size: int,
    *,
    name: str = "",
    target: Target | None = None,
) -> TracedStep:
    """The step of `make(batch_size)`, made and captured without memory for its tensors: for planning only.

    The graph is the one that `capture` makes of real tensors, so that a plan of it fits that one too (as long as
    there is no `target`).
    """
    train_step, model, optimizer, batch = made_without_memory(make, batch_size)
    return capture(train_step, model, optimizer, batch, name=name, target=target)


def _why_planning_only(model: nn.Module, target: Target | None) -> str:
    if target is not None:
        return f"its kernels are those of {target.name}"
    return "its tensors have no memory" if fake_mode_of(model) is not None else ""


_DISTRIBUTED = "communication between processes is not captured: pass the bare module, as it was before it was wrapped"
_COMPILED = "what it runs cannot be seen: pass the uncompiled model"

# What hides a part of the step, by the name of its class in torch: torch.distributed need not be there.
_HIDING = {
    "DistributedDataParallel": _DISTRIBUTED,
    "FullyShardedDataParallel": _DISTRIBUTED,
    "FSDPModule": _DISTRIBUTED,
    "DTensor": _DISTRIBUTED,
    "OptimizedModule": _COMPILED,
}


def _refuse_hidden(train_step: TrainStep, model: nn.Module) -> None:
    if hasattr(train_step, "_torchdynamo_orig_callable"):
        raise CaptureError("the train step is compiled, and what it runs cannot be seen: pass the uncompiled function")
    goes_past = isinstance(inspect.unwrap(train_step), ForwardAndBackward)  # whatever stands in for the model's call
    for path, module in model.named_modules():
        what = f"module {path}" if path else "the model"
        _refuse_kind(what, type(module))
        if module._compiled_call_impl is not None and not (goes_past and not path):
            raise CaptureError(f"{what} is compiled, and {_COMPILED}")
    for name, param in model.named_parameters():
        _refuse_kind(f"parameter {name}", type(param))


def _refuse_communication(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and "c10d" in node.target.namespace:
            raise CaptureError(f"the step communicates with other processes ({node.target}), which is not captured yet")


def _refuse_kind(what: str, kind: type) -> None:
    for cls in kind.__mro__:
        if cls.__name__ in _HIDING and cls.__module__.partition(".")[0] == "torch":
            raise CaptureError(f"{what} is of class {cls.__name__}: {_HIDING[cls.__name__]}")
