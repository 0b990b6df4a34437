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
from profiler.collectives import COMMUNICATION, is_collective
from profiler.errors import CaptureError
from profiler.ops import own_generators, storage_root, written
from profiler.tracing.calling_convention import BatchSlot, Convention
from profiler.tracing.eager_ways.draws import repeat_draws
from profiler.tracing.eager_ways.metrics import Callee, LiveCall
from profiler.tracing.fake_tensors.without_memory import fake_mode_of, made_without_memory
from profiler.tracing.fx_graphs.cleaning import clean
from profiler.tracing.fx_graphs.gpu_kernels import GpuKernels, Substitution, Target, as_on_gpu
from profiler.tracing.fx_graphs.typed_graph import lift
from profiler.tracing.guards import Change, LeftBehind
from profiler.tracing.joint import ForwardAndBackward
from profiler.tracing.one_trace import Trace, trace_step
from profiler.tracing.ranks.replicated import Layout, refuse_unsupported
from profiler.tracing.ranks.tensor_parallel import is_in_parts
from profiler.tracing.ranks.torch_distributed import BY_ITSELF
from profiler.tracing.trials.audit import OpSeen
from profiler.tracing.updates import early_updates as updates
from profiler.tracing.updates.optimizers import OpaqueStep
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
    train_step: TrainStep | None = None  # the user's own
    raw_ops: tuple[OpSeen, ...] = ()  # as they came from the tracer
    layout: Layout | None = None  # buckets of replicas, for traces to come
    planning_only: str = ""
    substitutions: tuple[Substitution, ...] = ()
    unknown: tuple[str, ...] = ()

    def check_runnable(self) -> None:
        """CaptureError where this step is for planning only; whoever measures, rewrites or runs a step asks first."""
        if self.planning_only:
            raise CaptureError(f"{self.graph.name} was captured for planning and cannot be run: {self.planning_only}")

    @property
    def runs_python(self) -> bool:
        """Whether an optimizer or a metric of the user's runs as itself inside the graph."""
        return any(isinstance(node.target, (OpaqueStep, LiveCall)) for node in self.nodes)

    @property
    def metrics(self) -> tuple[Callee, ...]:
        """The metrics that run as themselves."""
        return tuple(node.target.callee for node in self.nodes if isinstance(node.target, LiveCall))

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
    _refuse_closures(optimizer)
    kernels = None if target is None else GpuKernels(target)
    trace = trace_step(train_step, model, optimizer, batch, optimizer_outside=optimizer_outside, kernels=kernels)
    convention = _prepared(trace, free_gradients=free_gradients, early_updates=early_updates)
    lifted = lift(trace.module, convention.ports, convention.output_roles, name=name or type(model).__name__)
    _tell(lifted.graph, trace.opaque_reason, time.perf_counter() - started)
    return TracedStep(
        graph=lifted.graph if kernels is None else as_on_gpu(lifted.graph),
        module=trace.module,
        nodes=lifted.nodes,
        value_nodes=lifted.value_nodes,
        convention=convention,
        gradients=lifted.gradients,
        opaque_reason=trace.opaque_reason,
        train_step=train_step,
        raw_ops=trace.ops,
        layout=trace.layout,
        planning_only=_why_planning_only(model, target),
        substitutions=() if kernels is None else kernels.substitutions,
        unknown=() if kernels is None else kernels.unknown,
    )


def _prepared(trace: Trace, *, free_gradients: bool, early_updates: bool) -> Convention:
    """Clean the raw graph and carry out what was asked for; how the graph is called then."""
    _refuse_communication(trace.module.graph, in_parts=is_in_parts(trace.convention.model))
    repeat_draws(trace.module, trace.redraws)
    clean(trace.module)
    convention = trace.convention
    if free_gradients:
        convention = updates.free_gradients(trace.module, convention)
    if early_updates:
        if trace.opaque_reason:
            raise CaptureError(f"early updates need the optimizer inside the graph: {trace.opaque_reason}")
        updates.update_early(trace.module)
    return convention


def _tell(graph: Graph, opaque_reason: str, seconds: float) -> None:
    log.info(
        "captured %s in %.2f s: %d ops, %d storages%s",
        graph.name,
        seconds,
        len(graph.ops),
        len(graph.storages),
        f"; no optimizer in the graph: {opaque_reason}" if opaque_reason else "",
    )


@dataclass(frozen=True, kw_only=True)
class TraceAgain:
    """What one more trace of the step came to."""

    ops: tuple[OpSeen, ...]
    returned: tuple[Any, ...]  # the plain values among what it returns
    outside: tuple[Tensor, ...]  # tensors that it used and that are neither the model's nor the batch's
    written: tuple[Tensor, ...]  # those of them that it wrote to
    changes: tuple[Change, ...]
    left: LeftBehind
    left_later: LeftBehind  # the same where it found what the first trace had made of constants


def trace_again(workload: Workload, *, optimizer_outside: bool, layout: Layout | None = None) -> TraceAgain:
    """One more trace of the step; with the buckets that the first one found it need not look for them."""
    train_step, optimizer = with_stand_in_optimizer(workload.train_step, workload.optimizer)
    again = trace_step(
        train_step,
        workload.model,
        optimizer,
        workload.batch,
        optimizer_outside=optimizer_outside,
        layout=layout,
    )
    convention = again.convention
    return TraceAgain(
        ops=again.ops,
        returned=convention.result.leaves,
        outside=again.outside,
        written=_written_constants(again.module),
        changes=convention.guards.changes,
        left=convention.guards.left,
        left_later=convention.guards.left,
    )


def _written_constants(module: fx.GraphModule) -> tuple[Tensor, ...]:
    """The tensors from outside that a raw graph writes to."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    roots = {storage_root(n) for node in nodes for n in written(node)}
    return tuple(getattr(module, str(root.target)) for root in roots if root.op == "get_attr")


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
_SCRIPTED = (
    "its parameters live in TorchScript, where no stand-in can take their place: pass the module as it was before "
    "torch.jit.script or torch.jit.trace (functions may stay scripted), or plan the parts around it with "
    "checkpoint_model(part, budget=...)"
)

# What hides a part of the step, by the name of its class in torch: torch.distributed need not be there.
_HIDING = {
    "FullyShardedDataParallel": _DISTRIBUTED,
    "OptimizedModule": _COMPILED,
    "ScriptModule": _SCRIPTED,
}


def _refuse_hidden(train_step: TrainStep, model: nn.Module) -> None:
    if hasattr(train_step, "_torchdynamo_orig_callable"):
        raise CaptureError("the train step is compiled, and what it runs cannot be seen: pass the uncompiled function")
    refuse_unsupported(model)
    goes_past = isinstance(inspect.unwrap(train_step), ForwardAndBackward)  # whatever stands in for the model's call
    for path, module in model.named_modules():
        what = f"module {path}" if path else "the model"
        _refuse_kind(what, type(module))
        called = module._compiled_call_impl
        if called is not None and not (goes_past and getattr(called, "steps_aside", not path)):
            raise CaptureError(f"{what} is compiled, and {_COMPILED}")


def _refuse_closures(optimizer: Optimizer) -> None:
    if isinstance(optimizer, LBFGS):
        raise CaptureError(
            "LBFGS evaluates the loss anew inside its step, which is not one graph: plan forward and backward only, "
            "step = checkpoint(forward_backward, model, None, batch, ...), and call step(batch) in its closure"
        )


def _refuse_communication(graph: fx.Graph, *, in_parts: bool) -> None:
    """CaptureError for collectives of the step's own; what distributed tensors do to compute is none of those."""
    for node in graph.nodes:
        if in_parts and is_collective(node):
            continue
        if isinstance(node.target, OpOverload) and "c10d" in node.target.namespace and COMMUNICATION not in node.meta:
            raise CaptureError(BY_ITSELF.format(node.target))


def _refuse_kind(what: str, kind: type) -> None:
    for cls in kind.__mro__:
        if cls.__name__ in _HIDING and cls.__module__.partition(".")[0] == "torch":
            raise CaptureError(f"{what} is of class {cls.__name__}: {_HIDING[cls.__name__]}")
