"""Gradients that autograd's engine adds up of several parts, one for each read of a tensor: which nodes those sums are.

A planned backward hands such parts over one by one: whatever else the caller adds to the same gradient then comes
between them as it does in eager, and rounds as it does there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from profiler.errors import CaptureError
from profiler.tracing.ranks.torch_distributed import is_distributed

# Key of `node.meta`: the node adds a part of a gradient to those that came before, and does nothing else.
SUM = "sum_of_a_gradient"

Parts = dict[int, list[Tensor]]  # by the leaf that they are for: in the order in which they come


@contextmanager
def parts_noted(outputs: Sequence[Tensor], leaves: Sequence[Any]) -> Iterator[Parts]:
    """Inside, a backward from `outputs` notes the parts of gradients that it adds up, of leaves read several times."""
    place = {id(leaf): i for i, leaf in enumerate(leaves) if not is_distributed(leaf)}
    edges = _edges_to(outputs, place)
    counts = Counter(leaf for of_node in edges.values() for leaf in of_node.values())
    parts: Parts = {leaf: [] for leaf, count in counts.items() if count > 1}
    handles = [
        node.register_hook(partial(_note, parts, of_node))
        for node, of_node in edges.items()
        if any(leaf in parts for leaf in of_node.values())
    ]
    try:
        yield parts
    finally:
        for handle in handles:
            handle.remove()


def _edges_to(outputs: Sequence[Tensor], place: Mapping[int, int]) -> dict[Any, dict[int, int]]:
    """Per node behind `outputs`: which of the gradients that it makes go straight to which leaf."""
    rest = [output.grad_fn for output in outputs]
    edges: dict[Any, dict[int, int]] = {}
    while rest:
        node = rest.pop()
        if node is None or node in edges:
            continue
        following = [after for after, _ in node.next_functions]
        to = {i: place.get(id(getattr(after, "variable", None))) for i, after in enumerate(following)}
        edges[node] = {i: leaf for i, leaf in to.items() if leaf is not None}
        rest += following
    return edges


def _note(parts: Parts, edges: Mapping[int, int], made: Sequence[Tensor | None], _: Any) -> None:
    for i, leaf in edges.items():
        if leaf in parts and (part := made[i]) is not None:
            parts[leaf].append(part)


def mark_sums(parts: Parts, gradients: Sequence[Tensor | None]) -> None:
    """Mark the nodes that add up what was noted, where the step is being traced; CaptureError where they differ."""
    proxies = get_proxy_mode()
    if proxies is None:
        return

    def node_of(tensor: Tensor) -> fx.Node | None:
        slot = get_proxy_slot(tensor, proxies.tracer, None)
        return None if slot is None else slot.proxy.node

    for leaf, of_leaf in parts.items():
        gradient = gradients[leaf]
        if gradient is None or len(of_leaf) < 2:
            continue
        total: Any = node_of(gradient)
        others = [node_of(part) for part in reversed(of_leaf)]
        for part in others[:-1]:
            if total is None or total.target is not torch.ops.aten.add.Tensor or total.args[1] is not part:
                raise CaptureError(
                    "a tensor that is read several times gets its gradients summed in a way that is not known: "
                    f"{total} for {[str(node) for node in reversed(others)]}"
                )
            total.meta[SUM] = True
            total = total.args[0]
