"""The roofline: times of a device that is not here, worked out by hand on a small step."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from planner.ir import TimingKind
from profiler.capture import capture
from profiler.cost import Device, flops, is_view, moved_bytes, op_times_us, with_roofline_times

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
