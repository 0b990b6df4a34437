"""Equal ops have equal times, whatever a clock said of each."""

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import fx

from profiler.measuring.pooling import pooled


def stack(widths):
    """An fx graph of a product and an activation for each width, with the shapes that a capture notes."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, widths[0], device="meta")
    nodes = []
    for before, after in pairwise(widths):
        weight = graph.get_attr(f"w{len(nodes)}")
        weight.meta["val"] = torch.empty(before, after, device="meta")
        x = graph.call_function(torch.ops.aten.mm.default, (x, weight))
        x.meta["val"] = torch.empty(4, after, device="meta")
        nodes.append(x)
        x = graph.call_function(torch.ops.aten.relu.default, (x,))
        x.meta["val"] = torch.empty(4, after, device="meta")
        nodes.append(x)
    return nodes


def test_ops_that_do_the_same_work_have_one_time_and_the_sum_stays():
    nodes, random = stack([8] * 6), Random(0)
    times = [(100.0 if i % 2 == 0 else 5.0) * random.uniform(0.9, 1.1) for i in range(len(nodes))]
    found = pooled(nodes, times, in_place=[False] * len(nodes))
    assert len(set(found)) == 2
    assert sum(found) == pytest.approx(sum(times))
    assert found[0] == pytest.approx(sum(times[::2]) / 5)


def test_other_shapes_and_what_ran_in_place_are_pooled_apart():
    nodes = stack([8, 8, 8, 16])
    times = [10.0, 1.0, 20.0, 3.0, 70.0, 9.0]
    assert pooled(nodes, times, in_place=[False] * 6) == [15.0, 2.0, 15.0, 2.0, 70.0, 9.0]
    assert pooled(nodes, times, in_place=[False, True, False, False, False, False])[1::2] == [1.0, 3.0, 9.0]
