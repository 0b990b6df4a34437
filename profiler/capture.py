"""From the user's own `train_step(model, optimizer, batch)` to one graph of the whole step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.optim import LBFGS, Optimizer

from planner.ir import Graph
from profiler import updates
from profiler.convention import Convention
from profiler.errors import CaptureError
from profiler.functional import clean
from profiler.lift import lift
from profiler.ops import own_generators
from profiler.tracing import TrainStep, trace_step


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """One training step as a graph that computes eager's own bits.

    `nodes[op.id]` and `value_nodes[value.id]` are the fx nodes of `graph`'s ops and values, under the same
    names. `gradients` maps a parameter's name to the value that last holds its gradient before the optimizer
    steps. `opaque_reason` is "" where the optimizer is inside the graph.
    """

    graph: Graph
    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node, ...]
    convention: Convention
    gradients: Mapping[str, int]
    opaque_reason: str

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The user's own generators that the step draws from."""
        return tuple({id(g): g for node in self.nodes for g in own_generators(node)}.values())

    def run(self, batch: Any) -> Any:
        """One step of the captured graph, on the user's live model and optimizer."""
        return self.convention.call(self.module, batch)


def capture(
    train_step: TrainStep,
    model: nn.Module,
    optimizer: Optimizer,
    batch: Any,
    *,
    name: str = "",
    free_gradients: bool = False,
    early_updates: bool = False,
) -> TracedStep:
    """One graph of `train_step(model, optimizer, batch)`, or CaptureError; the user's objects stay as they are.

    The step's Python runs once, here, on stand-ins: what it prints or counts happens now and never again.
    `free_gradients` ends the step with every `.grad` at None. `early_updates` applies each parameter's update as
    soon as its gradient is complete; it needs the optimizer inside the graph.
    """
    if isinstance(optimizer, LBFGS):
        raise CaptureError("LBFGS evaluates the loss anew inside its step: that is not one graph")
    trace = trace_step(train_step, model, optimizer, batch)
    clean(trace.module)
    convention = trace.convention
    if free_gradients:
        convention = updates.free_gradients(trace.module, convention)
    if early_updates:
        if trace.opaque_reason:
            raise CaptureError(f"early updates need the optimizer inside the graph: {trace.opaque_reason}")
        updates.update_early(trace.module)
    lifted = lift(trace.module, convention, name=name or type(model).__name__)
    return TracedStep(
        graph=lifted.graph,
        module=trace.module,
        nodes=lifted.nodes,
        value_nodes=lifted.value_nodes,
        convention=convention,
        gradients=lifted.gradients,
        opaque_reason=trace.opaque_reason,
    )
