"""Ranks that are not here: what one of them captures, and what its collectives are estimated to take."""

import sys
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.group_link import GroupLink
from planner.simulator import unplanned
from profiler.errors import CaptureError
from profiler.estimating.devices import DEVICES, find_device
from profiler.estimating.roofline import estimated
from profiler.tracing import one_trace
from profiler.tracing.ranks.imagined import Sharding, imagined_group, shared_out, units
from profiler.tracing.whole_step import capture, capture_without_memory, trace_again
from profiler.workload import Workload

WIDTH, RANKS = 48, 8


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


def make(batch):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
    return Workload(step, model, torch.optim.AdamW(model.parameters(), fused=True), torch.randn(batch, WIDTH))


@cache
def on_rank(sharding, ranks=RANKS):
    with imagined_group(ranks) as mesh:
        return capture_without_memory(lambda batch: shared_out(make(batch), sharding, mesh), 4)


def collectives(sharding):
    graph = on_rank(sharding).graph
    return [op.collective for op in graph.ops if op.collective is not None and not op.waits]


def test_a_sharded_rank_begins_with_its_share_of_the_parameters():
    parameters = 3 * (WIDTH * WIDTH + WIDTH) * 4
    states = on_rank(Sharding.FSDP2).graph.start_bytes, on_rank(Sharding.DDP).graph.start_bytes
    assert states[0] < states[1] / (RANKS - 1)
    assert states[1] > 3 * parameters


def test_shards_are_gathered_and_reduced_and_replicas_summed():
    kinds = {sharding: {work.kind.value for work in collectives(sharding)} for sharding in Sharding}
    assert kinds == {Sharding.FSDP2: {"all-gather", "reduce-scatter"}, Sharding.DDP: {"all-reduce"}}
    assert {work.ranks for sharding in Sharding for work in collectives(sharding)} == {RANKS}


def test_buckets_that_one_trace_found_are_not_looked_for_again(monkeypatch):
    traced = []
    trace = one_trace._Session.trace
    monkeypatch.setattr(one_trace._Session, "trace", lambda session: [traced.append(1), trace(session)][1])
    with imagined_group(2) as mesh:
        model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))  # more than the first bucket's megabyte
        optimizer = torch.optim.SGD(model.parameters())
        workload = shared_out(Workload(step, model, optimizer, torch.randn(2, 600)), Sharding.DDP, mesh)
        first = capture(*workload)
        assert len(traced) == 2, "torch's own order, and the one in which gradients came"
        again = trace_again(workload, optimizer_outside=False, layout=first.layout)
    assert len(traced) == 3
    assert [op.whole for op in again.ops] == [op.whole for op in first.raw_ops]


@pytest.mark.parametrize("sharding", Sharding)
def test_collectives_take_what_the_link_of_the_device_allows(sharding):
    device = find_device("A100-40")
    found = unplanned(estimated(on_rank(sharding), device))
    assert found.communication_us == pytest.approx(sum(map(device.group_link.collective_us, collectives(sharding))))
    assert 0 <= found.hidden_us <= found.communication_us


def test_an_all_reduce_sends_everything_twice_round_the_ring():
    (work, *_) = collectives(Sharding.DDP)
    link = GroupLink.of(100, latency_us=3.0)
    assert link.collective_us(work) == pytest.approx(14 * 3.0 + 2 * 7 / 8 * work.nbytes / 100e9 * 1e6)


def test_every_device_of_the_catalogue_has_a_link_to_the_next_one():
    assert all(device.group_link is not None for device in DEVICES.values())
    assert find_device("A100-40").group_link == GroupLink.of(234.0, latency_us=3.4, start_us=8.4)


def test_nothing_of_the_group_is_left_behind():
    hook = sys.excepthook
    with pytest.raises(CaptureError, match="no parameter to train"), imagined_group(2) as mesh:
        shared_out(Workload(step, nn.ReLU(), None, None), Sharding.DDP, mesh)
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_a_rank_of_a_group_imagines_no_other():
    with imagined_group(2), pytest.raises(CaptureError, match="a rank of a group already"), imagined_group(2):
        pass


def test_a_model_that_cannot_be_sharded_is_one_sentence():
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0))})
    with imagined_group(2) as mesh, pytest.raises(CaptureError, match=r"cannot be shared out by fsdp2: .*scalar"):
        shared_out(Workload(step, model, None, None), Sharding.FSDP2, mesh)


def test_an_optimizer_of_other_tensors_is_refused():
    workload = make(2)._replace(optimizer=torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1))
    with imagined_group(2) as mesh, pytest.raises(CaptureError, match="no parameter of the model"):
        shared_out(workload, Sharding.FSDP2, mesh)


def test_repeated_blocks_are_gathered_one_by_one():
    model = make(1).model
    assert units(model) == tuple(model)
