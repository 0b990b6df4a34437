"""AOTAutograd's joint graph cut into forward and backward as a plan says: what inductor compiles."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from planner.ir import Graph, Op, Phase, Rerun, Role
from planner.schedule import Schedule
from planner.solve import Solution
from profiler.measuring.sampling import sampled
from profiler.ops import NUMBER, has_effect, is_getitem, is_random, memory_of
from profiler.tracing.fx_graphs.cleaning import settle_memory
from profiler.tracing.fx_graphs.provenance import META, Origin
from profiler.tracing.fx_graphs.typed_graph import Port, lift
from profiler.tracing.joint import OUTSIDE
from rewriter.replay import apply
from rewriter.ways.compiled import seams
from rewriter.ways.compiled.symbols import SYMBOLIC, at_hints


@dataclass(frozen=True, kw_only=True)
class JointGraph:
    """Forward and backward of one graph with `outside` between them, and the nodes of its ops and values by id."""

    graph: Graph
    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    value_nodes: tuple[fx.Node, ...]

    def check_runnable(self) -> None:
        """It always is."""


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """A joint graph that was planned."""

    solution: Solution
    saved_bytes: int  # what the forward hands to the backward beside its own inputs
    forward: fx.GraphModule
    backward: fx.GraphModule


def partitioned(
    joint: fx.GraphModule, num_fwd_outputs: int, *, name: str, solve: Callable[[Graph], Solution]
) -> Partitioned:
    """Forward and backward of AOTAutograd's joint graph, by the schedule that `solve` gives for its typed graph."""
    at_hints(joint)
    tangents = [tangent.name for tangent in seams.tangents_of(joint)]
    _close(joint, num_fwd_outputs)
    settle_memory(joint)
    found = _lifted(joint, num_fwd_outputs, name)
    solution = solve(found.graph)
    assert solution.schedule is not None
    forward, backward, saved = _cut(_replayed(found, solution.schedule), joint, num_fwd_outputs, tangents)
    return Partitioned(solution=solution, saved_bytes=_bytes_of(saved), forward=forward, backward=backward)


# -- closing ----------------------------------------------------------------------------------------------------


def _close(joint: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Forward first, then `outside` in the place of the tangents, then the backward; each node has its phase."""
    graph = joint.graph
    ahead = _forward_nodes(joint, num_fwd_outputs)
    for node in graph.nodes:
        phase = Phase.FORWARD if node in ahead or node.op != "call_function" else Phase.BACKWARD
        node.meta[META] = Origin(phase=phase, round=0, module_path=seams.module_path(node))
    last = graph.find_nodes(op="placeholder")[-1]
    for node in (*graph.find_nodes(op="get_attr"), *(n for n in list(graph.nodes) if n in ahead)):
        last.append(node)
        last = node
    (output,) = graph.find_nodes(op="output")
    returned = dict.fromkeys(n for n in output.args[0][:num_fwd_outputs] if isinstance(n, fx.Node) and _is_tensor(n))
    tangents = seams.tangents_of(joint)
    with graph.inserting_after(last):
        turn = graph.create_node("call_function", OUTSIDE, (list(returned), [], []), {}, "outside")
    turn.meta = {"val": [t.meta["val"] for t in tangents], META: Origin(phase=Phase.FORWARD, round=0)}
    last = turn
    for i, tangent in enumerate(tangents):
        with graph.inserting_after(last):
            last = graph.create_node("call_function", operator.getitem, (turn, i), {}, f"cut_{tangent.name}")
        last.meta = {**tangent.meta, META: turn.meta[META]}
        tangent.replace_all_uses_with(last)
        graph.erase_node(tangent)
    graph.lint()


def _forward_nodes(joint: fx.GraphModule, num_fwd_outputs: int) -> set[fx.Node]:
    """The calls that belong before the turn: what the outputs need, effects, and what stands before all tangents."""
    behind = set(seams.tangents_of(joint))
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    for node in calls:
        if seams.is_for_backward(node) or any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    first = next((i for i, node in enumerate(calls) if node in behind), len(calls))
    (output,) = joint.graph.find_nodes(op="output")
    wanted = [n for n in output.args[0][:num_fwd_outputs] if isinstance(n, fx.Node)]
    wanted += [n for i, n in enumerate(calls) if n not in behind and (i < first or has_effect(n))]
    ahead = set[fx.Node]()
    while wanted:
        node = wanted.pop()
        if node.op == "call_function" and node not in ahead:
            ahead.add(node)
            wanted += node.all_input_nodes
    return ahead


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


# -- lifting ----------------------------------------------------------------------------------------------------


def _lifted(joint: fx.GraphModule, num_fwd_outputs: int, name: str) -> JointGraph:
    inputs = joint.graph.find_nodes(op="placeholder")
    ports = [Port(name=node.name, role=Role.INPUT if _is_tensor(node) else None) for node in inputs]
    (output,) = joint.graph.find_nodes(op="output")
    flat = list(output.args[0])
    output.args = (tuple(n for n in flat if isinstance(n, fx.Node) and _is_tensor(n)),)
    roles = [
        Role.OUTPUT if i < num_fwd_outputs else Role.GRADIENT
        for i, n in enumerate(flat)
        if isinstance(n, fx.Node) and _is_tensor(n)
    ]
    lifted = lift(joint, ports, roles, name=name)
    output.args = (tuple(flat),)
    device = next((n.meta["val"].device for n in inputs if _is_tensor(n)), torch.device("cpu"))
    graph = sampled(lifted.graph, lifted.nodes, device=device)
    ops = tuple(_as_inductor_runs(op, node) for op, node in zip(graph.ops, lifted.nodes, strict=True))
    graph = replace(graph, ops=ops).validate()
    return JointGraph(graph=graph, module=joint, nodes=lifted.nodes, value_nodes=lifted.value_nodes)


def _as_inductor_runs(op: Op, node: fx.Node) -> Op:
    """Its code draws from its own generator, whose state nobody can replay, and chooses in-place forms by itself."""
    op = replace(op, overwritable=())
    if op.rerun is not Rerun.REPLAY_RNG and not is_random(node):
        return op
    return replace(op, rerun=Rerun.NEVER, never_reason="draws from inductor's generator", rng_state=None)


# -- two graphs -------------------------------------------------------------------------------------------------


def _replayed(found: JointGraph, schedule: Schedule) -> fx.GraphModule:
    whole = apply(found, schedule)
    for node in reversed(whole.graph.nodes):
        if is_getitem(node) and not node.users:
            whole.graph.erase_node(node)
    for node in whole.graph.nodes:
        if node.meta.get(SYMBOLIC) is not None:
            node.meta["val"] = node.meta[SYMBOLIC]
    return whole


def _cut(
    whole: fx.GraphModule, joint: fx.GraphModule, num_fwd: int, tangents: list[str]
) -> tuple[fx.GraphModule, fx.GraphModule, list[fx.Node]]:
    """AOTAutograd's convention: a forward of (outputs, saved, symbols) and a backward that takes (symbols, saved,
    tangents)."""
    nodes = list(whole.graph.nodes)
    at = next(i for i, node in enumerate(nodes) if node.target is OUTSIDE)
    before, turn, after, outputs = nodes[:at], nodes[at], nodes[at + 1 : -1], nodes[-1].args[0]
    behind = {turn, *after}
    read = [source for node in after for source in node.all_input_nodes]
    read += [node for node in outputs[num_fwd:] if isinstance(node, fx.Node)]
    needed = dict.fromkeys(node for node in read if node not in behind)
    ahead = [node for node in before if node in needed and node.op != "get_attr"]
    saved = [node for node in ahead if not _is_number(node)]
    # Inductor has to know every symbol, whether or not the backward reads it.
    sizes = [node for node in before if _is_number(node) and (node in needed or node.op == "placeholder")]
    (described,) = joint.graph.find_nodes(op="output")
    desc = list(described.meta.get("desc", [None] * len(outputs)))

    forward, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in before:
        new[node] = forward.node_copy(node, new.__getitem__)
    out = forward.output(tuple(fx.node.map_arg([*outputs[:num_fwd], *saved, *sizes], new.__getitem__)))
    out.meta["desc"] = desc[:num_fwd] + [None] * (len(saved) + len(sizes))

    backward, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*sizes, *saved):
        new[node] = backward.placeholder(node.name)
        new[node].meta = dict(node.meta)
    made = {node.args[1]: node for node in after if is_getitem(node) and node.args[0] is turn}
    for i, name in enumerate(tangents):
        place = backward.placeholder(name)
        if i in made:
            new[made[i]], place.meta = place, dict(made[i].meta)
    for node in before:
        if node.op == "get_attr" and node in needed:
            new[node] = backward.node_copy(node)
    for node in after:
        if node not in new:
            new[node] = backward.node_copy(node, new.__getitem__)
            new[node].meta["autograd_backward"] = True
    out = backward.output(tuple(fx.node.map_arg(list(outputs[num_fwd:]), new.__getitem__)))
    out.meta["desc"] = desc[num_fwd:]
    for graph in (forward, backward):
        graph.lint()
    return fx.GraphModule(joint, forward, "PlannedForward"), fx.GraphModule(joint, backward, "PlannedBackward"), saved


def _is_number(node: fx.Node) -> bool:
    return NUMBER in node.meta or (node.op == "placeholder" and not _is_tensor(node))


def _bytes_of(nodes: list[fx.Node]) -> int:
    made = {memory_of(n.meta["val"])._cdata: n.meta["val"] for n in nodes if n.op != "placeholder"}
    return sum(seams.hint_of(memory_of(tensor).nbytes()) for tensor in made.values())
