"""`cheap`: what it takes for cheap, and what for dear."""

from __future__ import annotations

import pytest

import strategies
from planner.ir import Graph
from planner.plan import Plan
from planner.solve import Problem, solve
from planner.synthetic import Network, residual_tower
from strategies.cheap import expensive
from tests.small import names

DEAR = (
    "aten.convolution.default",
    "aten.conv2d.default",
    "aten.mkldnn_convolution.default",
    "torchvision.deform_conv2d.default",
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten.matmul.default",
    "aten.linear.default",
    "aten.einsum.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
)
CHEAP = (
    "aten.relu.default",
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit_functional.default",
    "aten.native_layer_norm.default",
    "aten.max_pool2d_with_indices.default",
    "aten.avg_pool2d.default",
    "aten.add.Tensor",
    "aten.addcmul.default",
    "aten.gelu.default",
    "aten._softmax.default",
    "aten.native_dropout.default",
    "aten.upsample_bilinear2d.vec",
    "aten._to_copy.default",
    "prims.convert_element_type.default",
)


def is_dear(target: str) -> bool:
    """Whether the output of an op of that target is taken for expensive."""
    net = Network("lone")
    graph = net.graph(net.layer("loss", [net.layer("op", [net.x], 100, target=target)], 1))
    return expensive(graph, graph.storage_names.index("op"))


def dropped(graph: Graph, budget_bytes: int = 1) -> list[str]:
    return names(graph, solve(Problem(graph=graph, budget_bytes=budget_bytes), strategies.make("cheap")).dropped)


@pytest.mark.parametrize("target", DEAR)
def test_what_convolutions_and_matrix_products_made_is_dear(target):
    assert is_dear(target)


@pytest.mark.parametrize("target", CHEAP)
def test_what_normalisation_activation_pooling_and_elementwise_ops_made_is_cheap(target):
    assert not is_dear(target)


def two_branches() -> Graph:
    """Conv, norm and relu twice, each with a sum around it, wide enough that dropping pays."""
    net = Network("branches")
    x = net.layer("stem", [net.x], 10, target="conv", time_us=9.0)
    for i in range(2):
        h = net.layer(f"conv{i}", [x], 10, target="conv", time_us=9.0)
        h = net.layer(f"norm{i}", [h], 100, target="batch_norm", time_us=1.0)
        h = net.layer(f"relu{i}", [h], 100, target="relu", time_us=1.0)
        h = net.layer(f"squash{i}", [h], 10, target="conv", time_us=9.0)
        x = net.layer(f"add{i}", [h, x], 10, target="add", time_us=1.0)
    return net.graph(net.layer("loss", [x], 1))


def test_cheap_ops_are_dropped_and_sums_of_branches_kept():
    graph = two_branches()
    unplanned = Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    assert dropped(graph, unplanned - 1) == ["norm0", "relu0", "norm1", "relu1"]


def test_where_everything_fits_or_nothing_is_gained_nothing_is_dropped():
    graph = residual_tower(1)
    problem = Problem(graph=graph, budget_bytes=Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes)
    assert strategies.make("cheap").plan(problem) == Plan()
    tiny = Problem(graph=graph, budget_bytes=1)
    assert strategies.make("cheap").plan(tiny) == Plan()


def test_it_never_returns_a_plan_worse_than_keeping_everything():
    for graph in (residual_tower(4), two_branches()):
        problem = Problem(graph=graph, budget_bytes=1)
        solution = solve(problem, strategies.make("cheap"))
        assert solution.timeline.peak_bytes <= problem.unplanned.peak_bytes
