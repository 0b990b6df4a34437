"""Learning rates, traced as numbers that stand for them, become inputs that are read at each call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from profiler.tracing.calling import RateSlot


def stand_in_rate(group: int) -> float:
    """A number that stands for a group's learning rate in the trace, and for nothing else."""
    return math.ldexp(0.6180339887498949, -group)


def make_rates_live(graph: fx.Graph, groups: Iterable[int]) -> list[RateSlot]:
    """Replace the stand-ins of these groups by new inputs, and return what each of them is."""
    wanted = {sign * stand_in_rate(i): RateSlot(group=i, negated=sign < 0) for i in groups for sign in (1.0, -1.0)}
    found: dict[RateSlot, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]

    def live(value: Any) -> Any:
        if type(value) is not float or value not in wanted:
            return value
        slot = wanted[value]
        if slot not in found:
            with graph.inserting_after([last, *found.values()][-1]):
                found[slot] = graph.placeholder(f"rate_{len(found)}")
        return found[slot]

    for node in list(graph.nodes):
        if node.op == "call_function":
            node.args, node.kwargs = map_aggregate(node.args, live), map_aggregate(node.kwargs, live)
    return list(found)
