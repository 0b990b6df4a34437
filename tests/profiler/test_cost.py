"""The cost models: times of a device that is not here, worked out by hand on small steps."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.ir import TimingKind
from profiler.estimating.devices import Workspace, find_device
from profiler.estimating.kinds import OpKind, kind_of
from profiler.estimating.roofline import (
    Device,
    estimated,
    flops,
    is_view,
    moved_bytes,
    op_times_us,
    traffic_bytes,
    with_roofline_times,
)
from profiler.tracing.whole_step import capture

DEVICE = Device(name="slate", memory_bytes=100, flops_per_s=1e9, bytes_per_s=1e8, launch_us=7.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, bias=False)
        self.linear = nn.Linear(5 * 36, 4, bias=False)

    def forward(self, x):
        return self.linear(self.conv(x).flatten(1))


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


@pytest.fixture(scope="module")
def traced():
    torch.manual_seed(0)
    model = Net()
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    return capture(train, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), batch)


def only(traced, target):
    return next(i for i, op in enumerate(traced.graph.ops) if op.target.startswith(target))


def test_a_convolution_has_two_flops_per_multiply(traced):
    assert flops(traced.nodes[only(traced, "aten.convolution.")]) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def test_a_matrix_product_has_two_flops_per_multiply(traced):
    assert flops(traced.nodes[only(traced, "aten.mm.")]) == 2 * 2 * (5 * 36) * 4


def test_an_op_moves_every_tensor_that_it_reads_or_makes_once(traced):
    image, weight, out = 2 * 3 * 8 * 8, 5 * 3 * 3 * 3, 2 * 5 * 6 * 6
    assert moved_bytes(traced.nodes[only(traced, "aten.convolution.")]) == 4 * (image + weight + out)


def test_the_time_is_the_longer_of_arithmetic_and_traffic_and_one_launch(traced):
    conv = only(traced, "aten.convolution.")
    node = traced.nodes[conv]
    expected = max(flops(node) / 1e9, moved_bytes(node) / 1e8) * 1e6 + 7.0
    assert op_times_us(traced, DEVICE)[conv] == pytest.approx(expected)


def test_a_view_costs_nothing_and_nothing_else_is_free(traced):
    for op, us in zip(traced.graph.ops, op_times_us(traced, DEVICE), strict=True):
        assert (us == 0) == is_view(traced.graph, op)


def test_a_dtype_may_have_its_own_rate():
    device = Device(
        name="d", memory_bytes=1, flops_per_s=1.0, bytes_per_s=1.0, launch_us=0.0, flops_by_dtype={"bfloat16": 2.0}
    )
    assert (device.flops_for(torch.float32), device.flops_for(torch.bfloat16)) == (1.0, 2.0)


def test_the_graph_says_that_its_times_are_estimated(traced):
    graph = with_roofline_times(traced, DEVICE)
    assert graph.timing.kind is TimingKind.ESTIMATED
    assert str(graph.timing) == "estimated for slate"
    assert graph.fingerprint == traced.graph.fingerprint


# -- the estimate for a device ----------------------------------------------------------------------------------------

CARD = Device(
    name="card",
    memory_bytes=2**30,
    flops_per_s=1e9,
    bytes_per_s=1e8,
    launch_us=7.0,
    flops_by_dtype={"bfloat16": 4e9, "tf32": 2e9},
    arithmetic_share=0.5,
    bandwidth_share=0.25,
    block_bytes=512,
    workspaces={OpKind.MATMUL: Workspace(fixed_bytes=1000), OpKind.CONVOLUTION: Workspace(share=1.0)},
)


def test_an_estimated_matrix_product_by_hand(traced):
    mm = estimated(traced, CARD).ops[only(traced, "aten.mm.")]
    arithmetic_s = 2 * 2 * 180 * 4 / (1e9 * 0.5)  # float32 matrix products do not use tf32
    traffic_s = 4 * (2 * 180 + 180 * 4 + 2 * 4) / (1e8 * 0.25)
    assert traffic_s > arithmetic_s
    assert mm.time_us == pytest.approx(traffic_s * 1e6 + 7.0)
    assert mm.workspace_bytes == 1024


def test_an_estimated_convolution_by_hand(traced):
    fast_memory = replace(CARD, bytes_per_s=1e30)
    conv = estimated(traced, fast_memory).ops[only(traced, "aten.convolution.")]
    arithmetic_s = 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3) / (2e9 * 0.5)  # float32 convolutions do
    assert conv.time_us == pytest.approx(arithmetic_s * 1e6 + 7.0)
    assert conv.workspace_bytes == 2560  # it reads 4 x (384 + 135) B, more than it makes, in blocks of 512


def test_new_memory_costs_where_the_device_says_so_and_in_place_ops_make_none():
    def step(model, optimizer, x):
        return torch.relu(model(x)).sum()

    model = nn.Linear(64, 64, bias=False)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 64))
    ops = {op.target: op for op in estimated(traced, replace(CARD, new_bytes_per_s=1e6)).ops}
    plain = {op.target: op for op in estimated(traced, CARD).ops}
    made_us = 16 * 64 * 4 / 1e6 * 1e6
    large = replace(CARD, new_bytes_per_s=1e6, new_large_bytes_per_s=1e3, large_bytes=4096)
    slow = next(op for op in estimated(traced, large).ops if op.target == "aten.mm.default")
    assert slow.time_us - plain["aten.mm.default"].time_us == pytest.approx(1e3 * made_us)
    assert ops["aten.mm.default"].time_us - plain["aten.mm.default"].time_us == pytest.approx(made_us)
    assert ops["aten.relu.default"].time_us == plain["aten.relu.default"].time_us  # over the product, which dies there


def test_an_estimated_elementwise_op_moves_what_it_reads_and_makes():
    def step(model, optimizer, x):
        return model.weight * x + 1.0

    model = nn.Linear(32, 32, bias=False)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(32, 1).expand(32, 32))
    mul = only(traced, "aten.mul.")
    assert traffic_bytes(traced.nodes[mul]) == 4 * (32 * 32 + 32 + 32 * 32)  # of the broadcast column what is there
    moved_us = 4 * (2 * 32 * 32 + 32) / (1e8 * 0.25) * 1e6
    assert estimated(traced, CARD).ops[mul].time_us == pytest.approx(moved_us + 7.0)


def test_an_estimated_attention_by_hand():
    def step(model, optimizer, x):
        q, k, v = model(x).unflatten(-1, (3, 2, 8)).unbind(2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        loss = out.sum()
        loss.backward()
        return loss

    model = nn.Linear(16, 48, bias=False)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 5, 16))
    ops = estimated(traced, replace(CARD, bytes_per_s=1e30)).ops
    forward = only(traced, "aten._scaled_dot_product_flash_attention_for_cpu.")
    backward = only(traced, "aten._scaled_dot_product_flash_attention_for_cpu_backward.")
    product = 2 * (3 * 2) * 5 * 5 * 8  # each of the matrix products: batch x heads, tokens x tokens x width
    assert kind_of(traced.nodes[forward]) is OpKind.ATTENTION
    assert kind_of(traced.nodes[backward]) is OpKind.ATTENTION_BACKWARD
    assert ops[forward].time_us == pytest.approx(2 * product / (1e9 * 0.5) * 1e6 + 7.0)
    assert ops[backward].time_us == pytest.approx(5 * product / (1e9 * 0.5) * 1e6 + 7.0)


def test_arithmetic_runs_at_the_rate_of_its_inputs_dtype():
    def step(model, optimizer, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).sum()

    model = nn.Linear(64, 32, bias=False)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 64))
    mm = estimated(traced, replace(CARD, bytes_per_s=1e30)).ops[only(traced, "aten.mm.")]
    assert mm.time_us == pytest.approx(2 * 16 * 64 * 32 / (4e9 * 0.5) * 1e6 + 7.0)


def test_a_lookup_reads_the_rows_that_it_is_asked_for():
    def step(model, optimizer, x):
        return model(x).sum()

    model = nn.Embedding(10_000, 8)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor([1, 2, 3]))
    lookup = traced.nodes[only(traced, "aten.embedding.")]
    assert traffic_bytes(lookup) == 3 * 8 + 2 * (3 * 8 * 4)
    assert kind_of(lookup) is OpKind.LOOKUP


def test_the_backward_of_a_grouped_convolution_does_two_forwards():
    def step(model, optimizer, x):
        loss = model(model(x)).sum()
        loss.backward()
        return loss

    model = nn.Conv2d(6, 6, 3, groups=6, padding=1, bias=False)
    traced = capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 6, 8, 8))
    ops = estimated(traced, replace(CARD, bytes_per_s=1e30)).ops
    forward = 2 * (2 * 6 * 8 * 8) * (3 * 3)
    both, weight_only = (op.time_us for op in ops if op.target.startswith("aten.convolution_backward"))
    assert both == pytest.approx(2 * forward / (1e9 * 0.5) * 1e6 + 7.0)
    assert weight_only == pytest.approx(forward / (1e9 * 0.5) * 1e6 + 7.0)


def test_an_update_reads_and_writes_what_it_changes(traced):
    update = traced.nodes[only(traced, "aten._fused_sgd")]
    weights = 4 * (5 * 3 * 3 * 3 + 180 * 4)
    assert kind_of(update) is OpKind.UPDATE
    assert traffic_bytes(update) >= 3 * weights  # parameters and gradients in, parameters out


def test_views_are_free_and_storages_lie_in_whole_blocks(traced):
    graph = estimated(traced, CARD)
    for op in graph.ops:
        assert (op.time_us == 0) == is_view(graph, op)
    assert all(s.nbytes % 512 == 0 for s in graph.storages)
    for before, after in zip(traced.graph.storages, graph.storages, strict=True):
        assert before.nbytes <= after.nbytes < before.nbytes + 512


def test_an_estimate_says_what_it_is_for(traced):
    assert str(estimated(traced, find_device("t4")).timing) == "estimated for T4"


def test_the_fixed_roofline_gives_the_numbers_that_it_always_gave(traced):
    for op, node, us in zip(traced.graph.ops, traced.nodes, op_times_us(traced), strict=True):
        expected = 0.0 if is_view(traced.graph, op) else max(flops(node) / 120e12, moved_bytes(node) / 1.3e12) * 1e6 + 3
        assert us == pytest.approx(expected, rel=1e-12)


def test_every_op_of_a_small_net_has_its_kind():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4), nn.GELU(), nn.MaxPool2d(2),
        nn.Dropout(0.5), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    traced = capture(step, model, torch.optim.AdamW(model.parameters(), fused=True), batch)
    found = {}
    for op, node in zip(traced.graph.ops, traced.nodes, strict=True):
        found.setdefault(kind_of(node), set()).add(op.target.removeprefix("fresh aten.").removeprefix("aten."))
    assert "convolution.default" in found[OpKind.CONVOLUTION] & found[OpKind.DEPTHWISE]
    assert "convolution_backward.default" in found[OpKind.CONVOLUTION_BACKWARD] & found[OpKind.DEPTHWISE_BACKWARD]
    assert found[OpKind.NORM] == {"native_batch_norm.default"}
    assert found[OpKind.NORM_BACKWARD] == {"native_batch_norm_backward.default"}
    assert found[OpKind.TRANSCENDENTAL] == {"gelu.default", "gelu_backward.default"}
    assert {name.partition(".")[0] for name in found[OpKind.RANDOM]} <= {"bernoulli", "bernoulli_"}
    assert {name.partition(".")[0] for name in found[OpKind.POOLING]} == {
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
    }
    assert any(name.startswith("_fused_adamw") for name in found[OpKind.UPDATE])
    assert {name.partition(".")[0] for name in found[OpKind.SOFTMAX]} == {"_log_softmax", "_log_softmax_backward_data"}
