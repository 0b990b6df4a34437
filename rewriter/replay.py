"""A captured step and a Schedule in; a graph module that runs that schedule, and nothing else, out."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from planner.ir import Op, Rerun
from planner.schedule import Free, Run, RunKind, Schedule
from profiler.ops import inplace_call, without_side_effect
from profiler.tracing.whole_step import TracedStep
from rewriter.random_replay import ReplayingRng, SavingRng

# Key of `node.meta`: the position in the schedule of the Run that a node carries out.
STEP = "schedule_step"


def apply(traced: TracedStep, schedule: Schedule) -> fx.GraphModule:
    """The module that carries out `schedule`, with the placeholders and outputs of the captured one.

    Every Run is one call in the same order. Nothing is freed by name: the generated code lets go of a tensor
    right after its last use, which is where the schedule's Free stands.
    """
    traced.check_runnable()
    replay = _Replay(traced)
    for position, step in enumerate(schedule.steps):
        if isinstance(step, Free):
            replay.free(step.storage)
        else:
            replay.run(step, position)
    return replay.finish()


class _Replay:
    """The new graph as it grows, and which new node stands for each captured one at the moment."""

    def __init__(self, traced: TracedStep) -> None:
        self.traced = traced
        self.new = fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}
        self.states: dict[int, fx.Node] = {}  # op -> its saved generator state
        self.resident: set[int] = set()
        for node in traced.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.current[node] = self.new.node_copy(node, self.current.__getitem__)

    def free(self, storage: int) -> None:
        self.resident.discard(storage)
        for v in self.traced.graph.values_in[storage]:
            self.current.pop(self.traced.value_nodes[v], None)

    def run(self, step: Run, position: int) -> None:
        op, node = self.traced.graph.ops[step.op], self.traced.nodes[step.op]
        made = self._call(step, op, node, position)
        if step.into is not None:
            self.free(step.into)
        self._bind(op, node, made, again=step.kind is RunKind.RERUN)

    def _call(self, step: Run, op: Op, node: fx.Node, position: int) -> fx.Node:
        target, args, kwargs = _form(step, op, node)
        if op.rerun is Rerun.REPLAY_RNG and step.kind is RunKind.ORIGINAL_SAVING_RNG:
            return self._call_saving(op, node, target, args, kwargs, position)
        if op.rerun is Rerun.REPLAY_RNG and step.kind is RunKind.RERUN:
            made = self._node(ReplayingRng(target, _device(node)), args, kwargs, f"{node.name}_again", node, position)
            made.args = (self.states[op.id], *made.args)
            return made
        name = f"{node.name}_again" if step.kind is RunKind.RERUN else node.name
        return self._node(target, args, kwargs, name, node, position)

    def _call_saving(
        self, op: Op, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int
    ) -> fx.Node:
        pair = self._node(SavingRng(target, _device(node)), args, kwargs, f"{node.name}_and_state", node, position)
        self.states[op.id] = self.new.call_function(operator.getitem, (pair, 0))
        made = self.new.create_node("call_function", operator.getitem, (pair, 1), {}, node.name)
        made.meta = dict(node.meta)
        return made

    def _node(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
        like: fx.Node,
        position: int,
    ) -> fx.Node:
        new_args, new_kwargs = fx.node.map_arg((args, kwargs), self.current.__getitem__)
        made = self.new.create_node("call_function", target, new_args, new_kwargs, name)
        made.meta = {**like.meta, STEP: position}
        return made

    def _bind(self, op: Op, node: fx.Node, made: fx.Node, *, again: bool) -> None:
        """Let the captured op's outputs stand for what `made` returns; second copies of what is there are dropped."""
        graph = self.traced.graph
        for v in op.outputs:
            value, captured = graph.values[v], self.traced.value_nodes[v]
            if again and value.base is None and value.storage in self.resident:
                continue
            if captured is node:
                self.current[captured] = made
            else:
                item = self.new.create_node(
                    "call_function", operator.getitem, (made, captured.args[1]), {}, captured.name
                )
                item.meta = dict(captured.meta)
                self.current[captured] = item
            self.resident.add(value.storage)

    def finish(self) -> fx.GraphModule:
        (output,) = self.traced.module.graph.find_nodes(op="output")
        self.new.output(fx.node.map_arg(output.args[0], self.current.__getitem__))
        self.new.lint()
        return fx.GraphModule(self.traced.module, self.new, class_name="PlannedStep")


def _form(step: Run, op: Op, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of the form of the op that this step runs."""
    if step.into is not None:
        return inplace_call(node)
    if step.kind is RunKind.RERUN and op.rerun is Rerun.WITHOUT_SIDE_EFFECT:
        form = without_side_effect(node)
        assert form is not None, f"{node.name} has no form without side effect"
        return form
    return node.target, node.args, node.kwargs


def _device(node: fx.Node) -> Any:
    value = node.meta["val"]
    return (value if isinstance(value, Tensor) else value[0]).device
