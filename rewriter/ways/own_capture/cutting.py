"""A replayed forward-and-backward cut in two at `outside`, and its backward into stages that hand gradients over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from profiler.ops import memory_of, written
from profiler.tracing.gradient_sums import SUM
from profiler.tracing.joint import OUTSIDE

# Gradients leave a backward in about so many portions: as many as eager's would, as far as memory is concerned.
STAGES = 16
# ... and parts that are added to others, which the engine does at the end of a portion, in so many more at most.
STAGES_OF_PARTS = 256


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the backward: takes what is carried, gives gradients, and what the next stage is to carry.

    `run(carried)` empties the list that it is given, each entry at its last use.
    """

    run: Callable[[list[Any]], tuple[list[Any], list[Any]]]
    gradients: tuple[int, ...]  # which of the step's gradients it makes; where one is a sum, a part of them


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


@dataclass(frozen=True, kw_only=True)
class _Portion:
    """Nodes of the backward that run together, and what is handed over after them: of which gradient, and its node."""

    nodes: list[fx.Node] = field(default_factory=list)
    handed: list[tuple[int, Any]] = field(default_factory=list)


class _Cutter:
    """One module's nodes, sorted into the two halves."""

    def __init__(self, module: fx.GraphModule, gradients: Sequence[int], stages: int) -> None:
        self.module = module
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        nodes = list(graph.nodes)
        (turn,) = [i for i, node in enumerate(nodes) if node.target is OUTSIDE]
        self.inputs = graph.find_nodes(op="placeholder")
        self.early = [node for node in nodes[:turn] if node.op == "call_function"]
        self.late = [node for node in nodes[turn + 1 :] if node.op == "call_function"]
        (output,) = graph.find_nodes(op="output")
        late = set(gradients)
        self.returned = [node for i, node in enumerate(output.args[0]) if i not in late]
        self.parts = self._taken_apart([output.args[0][i] for i in gradients])
        self.outside = nodes[turn]
        self.tangents = [node for node in self.late if node.args and node.args[0] is self.outside]
        self.late = [node for node in self.late if node not in set(self.tangents)]
        self.stage_count = stages

    def _taken_apart(self, gradients: Sequence[Any]) -> list[list[Any]]:
        """Per gradient its parts, in the order in which they are added up; nothing here adds them any more."""
        apart, sums = [[gradient] for gradient in gradients], set[fx.Node]()
        for parts in apart:
            while isinstance(total := parts[0], fx.Node) and SUM in total.meta and len(total.users) == 1:
                sums.add(total)
                parts[:1] = total.args[:2]
        self.late = [node for node in self.late if node not in sums]
        copies = self._copies({part for parts in apart if len(parts) > 1 for part in parts})
        return [[copies.get(part, part) for part in parts] if len(parts) > 1 else parts for parts in apart]

    def _copies(self, parts: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
        """A copy of each part that somebody may write over, or owns, before it is added: it is made at once."""
        made, readers = set(self.late), _readers(self.late)
        copies: dict[fx.Node, fx.Node] = {}
        for part in parts:
            if part not in made or readers[memory_of(part.meta["val"])._cdata]:
                copies[part] = part.graph.call_function(torch.ops.aten.clone.default, (part,))
                copies[part].meta = dict(part.meta)
        behind = [[node, copies[node]] if node in copies else [node] for node in self.late]
        self.late = [copy for part, copy in copies.items() if part not in made] + [n for pair in behind for n in pair]
        return copies

    def halves(self) -> Halves:
        read = self._read_by(self.late, [part for parts in self.parts for part in parts])
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
        stages, portions = list[Stage](), self._portions()
        last: dict[Any, int] = {}  # the portion that reads a node last, or hands it over
        for number, portion in enumerate(portions):
            handed = [node for _, node in portion.handed]
            last |= dict.fromkeys(self._read_by(portion.nodes, handed), number)
        for number, portion in enumerate(portions):
            following = [node for node in (*carried, *portion.nodes) if last.get(node, -1) > number]
            run = self._stage(carried, portion.nodes, [node for _, node in portion.handed], following)
            stages.append(Stage(run=run, gradients=tuple(i for i, _ in portion.handed)))
            carried = following
        return tuple(stages)

    def _portions(self) -> list[_Portion]:
        """The backward's nodes in order, in portions, with what of gradients is there at the end of each."""
        due = self._due()
        nbytes = {node: _nbytes(node) for handed in due.values() for _, node in handed if isinstance(node, fx.Node)}
        firsts = [parts[0] for parts in self.parts]
        enough = max(1, sum(nbytes.get(node, 0) for node in firsts) // self.stage_count)
        added = [node for parts in self.parts for node in parts[1:]]
        enough = max(enough, sum(nbytes[node] for node in added) // STAGES_OF_PARTS)
        # The first runs nothing: the engine holds the tangents until it is over, and then only the stages do.
        portions = [_Portion(handed=due.pop(None, [])), _Portion()]
        portion_bytes = 0
        for node in self.late:
            portions[-1].nodes.append(node)
            portions[-1].handed.extend(due.get(node, ()))
            portion_bytes += sum(nbytes[part] for _, part in due.get(node, ()))
            if portion_bytes >= enough and node is not self.late[-1]:
                portions.append(_Portion())
                portion_bytes = 0
        return portions

    def _due(self) -> dict[fx.Node | None, list[tuple[int, Any]]]:
        """After which node (None: at once) what is handed over: as soon as it is made, but parts in their order."""
        place = {node: i for i, node in enumerate(self.late)}
        due: dict[fx.Node | None, list[tuple[int, Any]]] = {}
        for i, parts in enumerate(self.parts):
            latest = -1
            for part in parts:
                latest = max(latest, place.get(part, -1))
                due.setdefault(self.late[latest] if latest >= 0 else None, []).append((i, part))
        return due

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


def _nbytes(node: fx.Node) -> int:
    return memory_of(node.meta["val"]).nbytes()


def _readers(nodes: Sequence[fx.Node]) -> Counter[int]:
    """By memory: how many nodes read it, or write to it, that are no mere views of it."""
    found = Counter[int]()
    for node in nodes:
        own = _memory(node)
        read = {_memory(source) for source in node.all_input_nodes}
        found.update(memory for memory in read if memory is not None and (memory != own or written(node)))
    return found


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return memory_of(value)._cdata if isinstance(value, torch.Tensor) else None
