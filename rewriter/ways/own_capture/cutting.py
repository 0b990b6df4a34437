"""A replayed forward-and-backward cut in two at `outside`, and its backward into stages that hand gradients over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from profiler.ops import memory_of
from profiler.tracing.joint import OUTSIDE

# Gradients leave a backward in about so many portions: as many as eager's would, as far as memory is concerned.
STAGES = 16


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the backward: takes what is carried, gives gradients, and what the next stage is to carry.

    `run(carried)` empties the list that it is given, each entry at its last use.
    """

    run: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    gradients: tuple[int, ...]  # which of the step's gradients it completes


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Forward and backward of one schedule.

    `forward(*inputs)` gives what the model returns, and what is saved. `saved_inputs` are the placeholders that the
    backward reads as well: it gets them behind what is saved, and behind those the tangents.
    """

    forward: Callable[..., tuple[list[Any], list[Any]]]
    saved_inputs: tuple[int, ...]
    stages: tuple[Stage, ...]


def cut(module: fx.GraphModule, *, gradients: Sequence[int], stages: int = STAGES) -> Halves:
    """Both halves of a module; `gradients` are the positions of the outputs that its backward makes."""
    return _Cutter(module, gradients, stages).halves()


def take(carried: list[Any], index: int) -> Any:
    """An entry of a list, which lets go of it."""
    taken, carried[index] = carried[index], None
    return taken


class _Cutter:
    """One module's nodes, sorted into the two halves."""

    def __init__(self, module: fx.GraphModule, gradients: Sequence[int], stages: int) -> None:
        self.module = module
        nodes = list(module.graph.nodes)
        (turn,) = [i for i, node in enumerate(nodes) if node.target is OUTSIDE]
        self.inputs = module.graph.find_nodes(op="placeholder")
        self.early = [node for node in nodes[:turn] if node.op == "call_function"]
        self.late = [node for node in nodes[turn + 1 :] if node.op == "call_function"]
        (output,) = module.graph.find_nodes(op="output")
        late = set(gradients)
        self.returned = [node for i, node in enumerate(output.args[0]) if i not in late]
        self.gradients = [output.args[0][i] for i in gradients]
        self.outside = nodes[turn]
        self.tangents = [node for node in self.late if node.args and node.args[0] is self.outside]
        self.late = [node for node in self.late if node not in set(self.tangents)]
        self.stage_count = stages

    def halves(self) -> Halves:
        read = self._read_by(self.late, self.gradients)
        saved = [node for node in self.early if node in read]
        saved_inputs = [node for node in self.inputs if node in read]
        forward = self._module([*self.inputs], self.early, ([*self.returned], saved))
        stages = self._stages([*saved, *saved_inputs, *self._all_tangents()])
        return Halves(
            forward=forward, saved_inputs=tuple(self.inputs.index(node) for node in saved_inputs), stages=stages
        )

    def _all_tangents(self) -> list[Any]:
        """One entry for each tangent, None for one that nothing reads."""
        by_index = {node.args[1]: node for node in self.tangents}
        return [by_index.get(i) for i in range(len(self.outside.meta["val"]))]

    @staticmethod
    def _read_by(nodes: Sequence[fx.Node], outputs: Sequence[Any]) -> set[fx.Node]:
        read = {source for node in nodes for source in node.all_input_nodes}
        return read | {node for node in outputs if isinstance(node, fx.Node)}

    # -- stages ---------------------------------------------------------------------------------------------

    def _stages(self, carried: list[Any]) -> tuple[Stage, ...]:
        stages: list[Stage] = []
        rest, missing = list(self.late), dict(enumerate(self.gradients))
        for nodes, gradients in self._portions():
            rest = rest[len(nodes) :]
            missing = {i: node for i, node in missing.items() if i not in gradients}
            read = self._read_by(rest, [*missing.values()])
            next_carried = [node for node in (*carried, *nodes) if node is not None and node in read]
            run = self._stage(carried, nodes, [self.gradients[i] for i in gradients], next_carried)
            stages.append(Stage(run=run, gradients=tuple(gradients)))
            carried = next_carried
        return tuple(stages)

    def _portions(self) -> list[tuple[list[fx.Node], list[int]]]:
        """The backward's nodes in order, in portions, with the gradients that are complete at the end of each."""
        wanted: dict[fx.Node | None, list[int]] = {}
        for i, node in enumerate(self.gradients):
            wanted.setdefault(node if isinstance(node, fx.Node) else None, []).append(i)
        made = set(self.late)
        at_once = [i for node, indices in wanted.items() if node not in made for i in indices]
        nbytes = {node: _nbytes(node) for node in wanted if node in made}
        enough = max(1, sum(nbytes.values()) // self.stage_count)
        # The first runs nothing: the engine holds the tangents until it is over, and then only the stages do.
        portions: list[tuple[list[fx.Node], list[int]]] = [([], at_once), ([], [])]
        portion_bytes = 0
        for node in self.late:
            nodes, gradients = portions[-1]
            nodes.append(node)
            if node in nbytes:
                gradients += wanted[node]
                portion_bytes += nbytes[node]
            if portion_bytes >= enough and node is not self.late[-1]:
                portions.append(([], []))
                portion_bytes = 0
        return portions

    def _stage(
        self,
        carried: Sequence[Any],
        nodes: Sequence[fx.Node],
        gradients: Sequence[Any],
        following: Sequence[fx.Node],
    ) -> Callable[[list[Any]], tuple[list[Any], list[Any]]]:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        given = graph.placeholder("carried")
        position = {node: i for i, node in enumerate(carried) if node is not None}

        def here(node: fx.Node) -> fx.Node:
            if node not in new:
                if node.op == "get_attr":
                    new[node] = graph.node_copy(node)
                else:
                    new[node] = graph.call_function(take, (given, position[node]))
            return new[node]

        for node in nodes:
            for source in node.all_input_nodes:
                here(source)
            new[node] = graph.node_copy(node, here)
        results = [[here(n) if isinstance(n, fx.Node) else n for n in group] for group in (gradients, following)]
        graph.output(tuple(results))
        return _compiled(self.module, graph, "PlannedBackward")

    def _module(self, inputs: list[fx.Node], nodes: Sequence[fx.Node], outputs: tuple[Any, ...]) -> Callable[..., Any]:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in inputs:
            new[node] = graph.node_copy(node)

        def here(node: fx.Node) -> fx.Node:
            if node not in new and node.op == "get_attr":
                new[node] = graph.node_copy(node)
            return new[node]

        for node in nodes:
            for source in node.all_input_nodes:
                here(source)
            new[node] = graph.node_copy(node, here)
        graph.output(fx.node.map_arg(outputs, here))
        return _compiled(self.module, graph, "PlannedForward")


def _compiled(module: fx.GraphModule, graph: fx.Graph, name: str) -> Callable[..., Any]:
    graph.lint()
    forward: Callable[..., Any] = fx.GraphModule(module, graph, class_name=name).forward
    return forward  # without what a call of a module does around it, stage by stage


def _nbytes(node: fx.Node | None) -> int:
    return 0 if node is None else memory_of(node.meta["val"]).nbytes()
