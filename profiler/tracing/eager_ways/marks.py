"""Objects that stand for numbers in torch calls: on the way into the graph they become numbers, and are put back there.

For the length of one call such an object is a number that none of the call's other arguments is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError


def call_marked(
    graph: fx.Graph,
    func: Callable[..., Any],
    args: Any,
    kwargs: Any,
    marked: Mapping[int, tuple[type, Any]],
) -> Any:
    """`func(*args, **kwargs)`, of which some arguments are marks; the nodes that it makes get what they stand for.

    `marked` has, by the id of such an argument, the type of its number and what to put into the nodes.
    """
    numbers = _numbers_for(pytree.tree_leaves((args, kwargs)), marked)
    args, kwargs = pytree.tree_map(lambda leaf: numbers.get(id(leaf), leaf), (args, kwargs))
    last = next(reversed(graph.nodes))
    result = func(*args, **kwargs)
    _put_back(graph, last, {numbers[key]: put for key, (_, put) in marked.items()})
    return result


def _numbers_for(given: list[Any], marked: Mapping[int, tuple[type, Any]]) -> dict[int, Any]:
    taken = {float(leaf) for leaf in given if type(leaf) in (int, float, bool)}
    free = (k for k in count(1_000_003) if k not in taken and k + 0.5 not in taken)
    return {key: k if kind is int else k + 0.5 for (key, (kind, _)), k in zip(marked.items(), free, strict=False)}


def _put_back(graph: fx.Graph, last: fx.Node, put: Mapping[Any, Any]) -> None:
    missing = set(put)

    def replaced(value: Any) -> Any:
        if type(value) not in (int, float) or value not in put:
            return value
        missing.discard(value)
        return put[value]

    node = last.next
    while node is not graph._root:
        node.args, node.kwargs = map_aggregate(node.args, replaced), map_aggregate(node.kwargs, replaced)
        node = node.next
    if missing:
        raise CaptureError("a number that is read anew at each step goes into an op that hides it")
