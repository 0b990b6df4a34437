"""Options that change when gradients and parameters change hands, but no bit of any result.

Freeing gradients lets the step end without `.grad`s. Early updates split an optimizer's multi-tensor calls by
parameter and move each one up to where its gradient is complete, so that the gradient can go at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from planner.ir import Phase
from profiler.errors import CaptureError
from profiler.ops import ALIAS_OF, base_name, is_getitem, storage_root, written
from profiler.tracing.calling_convention import Convention, GradSlot
from profiler.tracing.eager_ways.assumptions import Check
from profiler.tracing.fx_graphs.provenance import origin_of

_PER_TENSOR = ("_foreach_", "_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


def free_gradients(module: fx.GraphModule, convention: Convention) -> Convention:
    """Let the step end with every `.grad` at None; CaptureError where its gradients add up from call to call."""
    kept = {slot.param.name for slot in convention.inputs if isinstance(slot, GradSlot)}
    left = [slot for slot in convention.outputs if isinstance(slot, GradSlot)]
    if kept:
        raise CaptureError(
            f"the step adds to the .grad that {sorted(kept)[0]} has when it begins: its gradients cannot be freed; "
            "call optimizer.zero_grad() inside the step"
        )
    (output,) = module.graph.find_nodes(op="output")
    pairs = zip(convention.outputs, output.args[0], strict=True)
    remaining = [(slot, node) for slot, node in pairs if not isinstance(slot, GradSlot)]
    output.args = (tuple(node for _, node in remaining),)
    cleared = dict.fromkeys((*convention.cleared, *(slot.param for slot in left)))
    return replace(convention, outputs=tuple(slot for slot, _ in remaining), cleared=tuple(cleared))


def update_early(module: fx.GraphModule) -> None:
    """Apply each parameter's update as soon as its gradient is complete and nobody reads the old value any more.

    An op that looks at all gradients, such as clipping by the global norm, holds the updates back by itself.
    """
    for node in list(module.graph.nodes):
        if _splits(node):
            _split(module.graph, node)
    _hoist(module.graph)
    module.graph.lint()
    module.recompile()


# -- one call per parameter -------------------------------------------------------------------------------------


def _splits(node: fx.Node) -> bool:
    if node.op != "call_function" or is_getitem(node) or not isinstance(node.target, OpOverload):
        return False
    return (
        origin_of(node).phase is Phase.OPTIMIZER and base_name(node.target).startswith(_PER_TENSOR) and _width(node) > 1
    )


def _width(node: fx.Node) -> int:
    """How many tensors a multi-tensor call works on: the length of its first list."""
    return next((len(arg) for arg in node.args if isinstance(arg, (list, tuple))), 0)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    width = _width(node)
    items = {user.args[1]: user for user in node.users}
    for i in range(width):
        with graph.inserting_before(node):
            args, kwargs = (_slice(given, i, width) for given in (node.args, node.kwargs))
            one = graph.create_node("call_function", node.target, args, kwargs, f"{node.name}_{i}")
        value = node.meta.get("val")
        one.meta = {**node.meta, "val": value[i : i + 1] if isinstance(value, (list, tuple)) else value}
        if i in items:
            items[i].args = (one, 0)
            node.prepend(items[i])
    graph.erase_node(node)


def _slice(given: Any, i: int, width: int) -> Any:
    """The i-th entry of every list of that width, as a list of one; everything else as it is."""

    def one(value: Any) -> Any:
        return value[i : i + 1] if isinstance(value, (list, tuple)) and len(value) == width else value

    return {k: one(v) for k, v in given.items()} if isinstance(given, dict) else tuple(one(v) for v in given)


# -- moving up ----------------------------------------------------------------------------------------------------


def _hoist(graph: fx.Graph) -> None:
    """Stable order by the last node that each optimizer op has to wait for."""
    place: dict[fx.Node, int] = {}
    last_read: dict[fx.Node, int] = {}
    last_write: dict[fx.Node, int] = {}
    last_check = 0  # what stops the step does so before anything is changed
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        reads, writes = _roots(node.all_input_nodes), _roots(written(node))
        if not _movable(node):
            place[node] = position
        else:
            waits = [place[source] for source in node.all_input_nodes]
            waits += [last_write.get(root, 0) for root in reads]
            waits += [last_read.get(root, 0) for root in writes]
            waits.append(last_check if writes else 0)
            place[node] = max(waits, default=0)
        if isinstance(node.target, Check):
            last_check = place[node]
        for root in reads:
            last_read[root] = max(last_read.get(root, 0), place[node])
        for root in writes:
            last_write[root] = max(last_write.get(root, 0), place[node])
    for node in sorted(nodes, key=place.__getitem__):  # stable: equals stay in their order
        graph._root.prepend(node)


def _movable(node: fx.Node) -> bool:
    if node.op != "call_function" or isinstance(node.target, Check):
        return False
    return origin_of(node).phase is Phase.OPTIMIZER if not is_getitem(node) else _movable(node.args[0])  # type: ignore[arg-type]


def _roots(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes whose memory the given ones lie in; one that makes no tensor of its own stands for none."""
    return [storage_root(node) for node in nodes if ALIAS_OF in node.meta]
