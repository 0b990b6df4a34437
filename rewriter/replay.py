"""A captured step and a Schedule in; a graph module that runs that schedule, and nothing else, out."""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable
from typing import Any, Protocol, assert_never

from torch import fx

from planner.errors import LinkError
from planner.ir import Graph
from planner.schedule import Launch, Schedule, Wait, Work
from planner.walk import Freed, Launched, Ran, Waited, walk
from profiler.measuring.hosts import Host
from profiler.op_forms import Form, Generator, form_of
from profiler.ops import NUMBER
from profiler.random_replay import ReplayingRng, SavingRng
from rewriter.moving import Send, fetch_from_host, wait_until_away, wait_until_back

log = logging.getLogger("recompute_planner")

# Key of `node.meta`: the position in the schedule of the Run that a node carries out.
STEP = "schedule_step"


class Captured(Protocol):
    """A typed graph, the module that it was made of, and the fx nodes of its ops and values by id."""

    @property
    def graph(self) -> Graph: ...

    @property
    def module(self) -> fx.GraphModule: ...

    @property
    def nodes(self) -> tuple[fx.Node, ...]: ...

    @property
    def value_nodes(self) -> tuple[fx.Node, ...]: ...

    def check_runnable(self) -> None:
        """CaptureError where it is for planning only."""


def apply(traced: Captured, schedule: Schedule, host: Host | None = None) -> fx.GraphModule:
    """The module that carries out `schedule`, with the placeholders and outputs of the captured one.

    Every Run is one call in the same order. Nothing is freed by name: the generated code lets go of a tensor
    right after its last use, which is where the schedule's Free stands. What is moved goes to `host`.
    """
    started = time.perf_counter()
    traced.check_runnable()
    replay = _Replay(traced, host)
    for position, event in enumerate(walk(traced.graph, schedule)):
        match event:
            case Ran():
                replay.run(event, position)
            case Freed():
                replay.free(event.step.storage)
            case Launched():
                replay.launch(event.step)
            case Waited():
                replay.wait(event.step)
            case _:
                assert_never(event)
    module = replay.finish()
    log.info("rewrote %s in %.2f s: %d steps", traced.graph.name, time.perf_counter() - started, len(schedule.steps))
    return module


class _Replay:
    """The new graph as it grows, and which new node stands for each captured one at the moment."""

    def __init__(self, traced: Captured, host: Host | None) -> None:
        self.traced = traced
        self.host = host
        self.moves: dict[int, fx.Node] = {}  # storage on its way -> its move
        self.went: dict[int, list[fx.Node]] = {}  # ... and the captured nodes that went with it
        self.new = fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}  # as each was first made: what a freed output was
        self.states: dict[int, fx.Node] = {}  # op -> its saved generator state
        for node in traced.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.current[node] = self.new.node_copy(node, self.current.__getitem__)

    def free(self, storage: int) -> None:
        for v in self.traced.graph.values_in[storage]:
            self.current.pop(self.traced.value_nodes[v], None)

    # -- to the host and back -------------------------------------------------------------------------------

    def _here(self, storage: int) -> list[fx.Node]:
        """The captured nodes of a storage that stand for tensors now."""
        nodes = (self.traced.value_nodes[v] for v in self.traced.graph.values_in[storage])
        return [node for node in dict.fromkeys(nodes) if node in self.current]

    def launch(self, launch: Launch) -> None:
        storage = launch.storage
        match launch.lane.work:
            case Work.COPY_OUT:
                if self.host is None:
                    raise LinkError("this plan moves tensors to the host, and there is none here: plan without a link")
                base = self.current[self._here(storage)[0]]
                self.moves[storage] = self.new.call_function(Send(self.host), (base,))
            case Work.COPY_IN:
                self.moves[storage] = self.new.call_function(fetch_from_host, (self.moves[storage],))
            case Work.COLLECTIVE:
                pass  # the op that has just run
            case _:
                assert_never(launch.lane.work)

    def wait(self, wait: Wait) -> None:
        storage = wait.storage
        match wait.lane.work:
            case Work.COPY_OUT:
                self.went[storage] = self._here(storage)
                tensors = [self.current[node] for node in self.went[storage]]
                self.moves[storage] = self.new.call_function(wait_until_away, (self.moves[storage], *tensors))
            case Work.COPY_IN:
                made = self.new.call_function(wait_until_back, (self.moves.pop(storage),))
                for i, node in enumerate(self.went.pop(storage)):
                    self.current[node] = self.new.call_function(operator.getitem, (made, i))
                    self.current[node].meta = dict(node.meta)
            case Work.COLLECTIVE:
                pass  # the op that runs next
            case _:
                assert_never(wait.lane.work)

    # -- runs -----------------------------------------------------------------------------------------------

    def run(self, ran: Ran, position: int) -> None:
        node = self.traced.nodes[ran.step.op]
        made = self._call(form_of(ran.step, ran.op, node), ran, node, position)
        if ran.step.into is not None:
            self.free(ran.step.into)
        self._bind(ran, node, made)

    def _call(self, form: Form, ran: Ran, node: fx.Node, position: int) -> fx.Node:
        name = f"{node.name}_again" if ran.again else node.name
        match form.generator:
            case Generator.AS_IT_IS:
                return self._node(form.target, form, name, node, position)
            case Generator.SAVED:
                return self._call_saving(form, ran.step.op, node, position)
            case Generator.REPLAYED:
                made = self._node(ReplayingRng(form.target, form.device), form, name, node, position)
                made.args = (self.states[ran.step.op], *made.args)
                return made
            case _:
                assert_never(form.generator)

    def _call_saving(self, form: Form, op: int, node: fx.Node, position: int) -> fx.Node:
        pair = self._node(SavingRng(form.target, form.device), form, f"{node.name}_and_state", node, position)
        self.states[op] = self.new.call_function(operator.getitem, (pair, 0))
        made = self.new.create_node("call_function", operator.getitem, (pair, 1), {}, node.name)
        made.meta = dict(node.meta)
        return made

    def _node(self, target: Callable[..., Any], form: Form, name: str, like: fx.Node, position: int) -> fx.Node:
        new_args, new_kwargs = fx.node.map_arg((form.args, form.kwargs), self.current.__getitem__)
        made = self.new.create_node("call_function", target, new_args, new_kwargs, name)
        made.meta = {**like.meta, STEP: position}
        return made

    def _bind(self, ran: Ran, node: fx.Node, made: fx.Node) -> None:
        """Let the captured op's outputs stand for what `made` returns; second copies of what is there are dropped."""
        if NUMBER in node.meta:
            self.current[node] = made
        for v in ran.op.outputs:
            value, captured = self.traced.graph.values[v], self.traced.value_nodes[v]
            if value.base is None and value.storage not in ran.made:
                continue
            if captured is node:
                self.current[captured] = made
            else:
                item = self.new.create_node(
                    "call_function", operator.getitem, (made, captured.args[1]), {}, captured.name
                )
                item.meta = dict(captured.meta)
                self.current[captured] = item
            self.first.setdefault(captured, self.current[captured])

    def finish(self) -> fx.GraphModule:
        (output,) = self.traced.module.graph.find_nodes(op="output")
        self.new.output(fx.node.map_arg(output.args[0], lambda node: self.first.get(node) or self.current[node]))
        self.new.lint()
        return fx.GraphModule(self.traced.module, self.new, class_name="PlannedStep")
