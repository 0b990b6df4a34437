"""`cheap`: what it takes for cheap, and what for dear."""

from __future__ import annotations

import pytest

import strategies
from bench.synthetic import Network, residual_tower
from planner.ir import Graph
from planner.plan import Plan
from planner.solve import Problem, solve
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


def lone(target: str) -> Graph:
    """One op of that target, whose output the backward reads."""
    net = Network("lone")
    return net.graph(net.layer("loss", [net.layer("op", [net.x], 100, target=target)], 1))


def dropped(graph: Graph, budget_bytes: int = 1) -> list[str]:
    return names(graph, solve(Problem(graph=graph, budget_bytes=budget_bytes), strategies.make("cheap")).dropped)


@pytest.mark.parametrize("target", DEAR)
def test_what_convolutions_and_matrix_products_made_is_kept(target):
    assert dropped(lone(target)) == []


@pytest.mark.parametrize("target", CHEAP)
def test_what_normalisation_activation_pooling_and_elementwise_ops_made_is_dropped(target):
    assert dropped(lone(target)) == ["op"]


def test_a_tower_keeps_its_convolutions_and_drops_the_rest():
    assert dropped(residual_tower(1)) == ["b0_norm.1", "b0_relu", "b0_add"]


def test_where_everything_fits_nothing_is_dropped():
    graph = residual_tower(1)
    problem = Problem(graph=graph, budget_bytes=Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes)
    assert strategies.make("cheap").plan(problem) == Plan()


def test_it_knows_one_plan_for_every_budget_that_keeping_everything_does_not_meet():
    graph = residual_tower(2)
    unplanned = Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    assert dropped(graph, unplanned - 1) == dropped(graph, 1) != []
