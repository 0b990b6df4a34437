"""Equal ops take equal time: what differs between the layers of a stack, once measured, is noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, fx


def pooled(nodes: Sequence[fx.Node], times_us: Sequence[float], *, in_place: Sequence[bool]) -> list[float]:
    """The time of each op as the mean over all ops that do the same work; the sum stays what it was.

    What ran in place of its input has not paid for new memory, and is pooled apart.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        groups[_work(node), in_place[i]].append(i)
    found = list(times_us)
    for alike in groups.values():
        mean = sum(times_us[i] for i in alike) / len(alike)
        for i in alike:
            found[i] = mean
    return found


def _work(node: fx.Node) -> Hashable:
    """What an op computes, whatever it computes it of: its target, its numbers, the shapes of its tensors."""
    return str(node.target), _described(node.args), _described(node.kwargs), _tensors(node.meta.get("val"))


def _described(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        return _tensors(argument.meta.get("val"))
    if isinstance(argument, (tuple, list)):
        return tuple(_described(item) for item in argument)
    if isinstance(argument, dict):
        return tuple((key, _described(value)) for key, value in argument.items())
    return repr(argument)


def _tensors(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return tuple(_tensors(item) for item in value)
    return repr(value)
