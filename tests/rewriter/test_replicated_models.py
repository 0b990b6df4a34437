"""The model door with DistributedDataParallel around it, and with fully_shard: the same bits, whichever comes first."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import CaptureError
from profiler.measuring.memory import live_bytes
from rewriter import checkpoint_model, uncheckpoint
from rewriter.ways.common import Way
from tests.ranks import assert_predicted, on_ranks, told_by
from tests.rewriter.test_replicas import SMALL_BUCKETS_MB, Net, batch_of, sgd
from tests.rewriter.test_shards import Decoder, loss_of, tokens

CPU = torch.device("cpu")


def _trained(rank: int, order: str) -> tuple[list[Tensor], Any]:
    """Parameters, buffers and gradients after four steps, and what was planned."""
    torch.manual_seed(0)
    model: Any = Net()
    if order == "planned, then wrapped":
        checkpoint_model(model, budget="70%", strategy="mutwo")
    before, parameter_bytes = live_bytes(CPU, without=[]), sum(p.nbytes for p in model.parameters())
    model = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB)
    assert live_bytes(CPU, without=[]) - before >= parameter_bytes, "a budget in bytes counts the reducer's buckets"
    if order == "wrapped, then planned":
        model = checkpoint_model(model, budget="70%", strategy="mutwo")
    optimizer = sgd(model.parameters())
    torch.manual_seed(1000 + rank)
    for i in range(4):
        batch = batch_of(rank, seed=i)
        loss = cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        if loss.item() > 0:  # the loop is live Python
            optimizer.step()
    left = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    left += [p.grad.clone() for p in model.parameters()]
    planned = None if order == "eager" else model.module.planned
    if order == "wrapped, then planned":
        assert model.planned is planned
        uncheckpoint(model)
        assert not hasattr(model.module, "planned")
    return left, planned and (planned.way, planned.verification, planned.solution.dropped)


def _both(rank: int) -> list[Any]:
    eager, _ = _trained(rank, "eager")
    found = []
    for order in ("planned, then wrapped", "wrapped, then planned"):
        left, planned = _trained(rank, order)
        found.append((all(map(torch.equal, left, eager)), planned))
    return found


def test_a_planned_model_trains_as_replicas_whichever_comes_first() -> None:
    for of_rank in on_ranks(_both):
        for is_equal, (way, proof, dropped) in of_rank:
            assert is_equal
            assert way is Way.OWN_CAPTURE
            assert proof.exact
            assert_predicted(proof.prediction_error)
            assert dropped


# -- shards ---------------------------------------------------------------------------------------------------------


def _of_shards(rank: int, order: str) -> tuple[list[Tensor], Any]:
    """Shards of parameters and gradients after four steps, and what was planned."""
    torch.manual_seed(0)
    model: Any = Decoder()
    if order == "planned, then sharded":
        checkpoint_model(model, budget="60%", strategy="mutwo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "sharded, then planned":
        checkpoint_model(model, budget="60%", strategy="mutwo")
    optimizer = sgd(model.parameters())
    torch.manual_seed(1000 + rank)
    for i in range(4):
        loss = loss_of(model, tokens(rank, i))
        optimizer.zero_grad()
        loss.backward()
        if loss.item() > 0:  # the loop is live Python
            optimizer.step()
    del loss
    gc.collect()
    live = live_bytes(CPU, without=[])
    left = [t.to_local().detach().clone() for p in model.parameters() for t in (p, p.grad)]
    if order == "eager":
        return left, live
    planned = model.planned
    gathers = [word for word in planned.taken.form.collectives if word.startswith("all_gather_into_tensor")]
    return left, (planned.way, planned.verification, len(gathers), planned.timeline().hidden_us, live)


def _both_of_shards(rank: int) -> list[Any]:
    eager, live = _of_shards(rank, "eager")
    live += sum(tensor.nbytes for tensor in eager)  # which are kept for what comes
    found = []
    for order in ("planned, then sharded", "sharded, then planned"):
        left, (*planned, ours) = _of_shards(rank, order)
        found.append((all(map(torch.equal, left, eager)), planned, ours - live))
        del left
    return found


def test_a_planned_model_trains_as_shards_whichever_comes_first() -> None:
    for of_rank in on_ranks(_both_of_shards):
        for is_equal, (way, proof, gathers, hidden_us), more_bytes in of_rank:
            assert is_equal
            assert more_bytes <= 1024, "whole parameters are let go between steps"
            assert way is Way.OWN_CAPTURE
            assert proof.exact
            assert_predicted(proof.prediction_error)
            assert proof.measured_peak_bytes < 0.7 * proof.eager_peak_bytes
            assert hidden_us > 0, "gathers are launched earlier than waited for"
            assert gathers >= 3, "each unit's at least once, as the plan decides"


def blocks_of_shards(rank: int, **options: Any) -> nn.Module:
    """A plain nn.Sequential around sharded blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return checkpoint_model(model, strategy="mutwo", **options) if options else model


def _ragged(rank: int) -> tuple[bool, int]:
    """The third batch of rank 1 alone is shorter."""
    left = []
    for options in ({}, {"budget": "70%"}):
        model: Any = blocks_of_shards(rank, **options)
        optimizer = sgd(model.parameters())
        for i in range(5):
            rows = 24 if (rank, i) == (1, 3) else 64
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(10 * i + rank))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        left.append([p.to_local().detach().clone() for p in model.parameters()])
    return all(map(torch.equal, *left)), len(model.planned.taken._forms)


def test_blocks_of_shards_in_a_plain_model_are_planned_and_a_ragged_batch_of_one_rank_on_all() -> None:
    for is_equal, forms in on_ranks(_ragged):
        assert is_equal
        assert forms == 2


def _several_at_once(rank: int) -> tuple[list[str], str]:
    """Two forwards before one backward, and a part of a sharded model that is planned by itself."""
    model: Any = blocks_of_shards(rank, budget="90%")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            (model(torch.randn(64, 16)) + model(torch.randn(64, 16))).square().mean().backward()
    whole: Any = fully_shard(blocks_of_shards(rank), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpoint_model(whole[1], budget="90%")
    try:
        whole(torch.randn(64, 16))
    except CaptureError as error:
        return [str(one.message) for one in said], str(error)
    return [], ""


def test_several_forwards_of_shards_are_told_and_a_part_of_them_is_refused() -> None:
    for said, refused in on_ranks(_several_at_once):
        assert [words for words in said if "where eager adds them up first" in words]
        assert refused.startswith("this model is a part of one that fully_shard was applied to")


def _dies_in_a_step(rank: int) -> None:
    model = blocks_of_shards(rank, budget="100%")
    for i in range(4):
        out = model(torch.randn(64, 16)).square().mean()
        if rank == 1 and i == 3:
            os._exit(9)
        out.backward()


def test_a_rank_that_dies_before_its_backward_leaves_the_others_with_a_sentence() -> None:
    first, second = told_by(_dies_in_a_step)
    assert second.lost
    assert first.error.startswith("RankError: rank 0 was left alone in the middle of a step")


def _fails_alone(rank: int) -> None:
    """Rank 1's second batch is one that the model cannot take."""
    model = blocks_of_shards(rank, budget="70%")
    for width in (16, 16 if rank == 0 else 12):
        model(torch.randn(64, width)).square().mean().backward()
        model.zero_grad()


def test_a_batch_that_fails_on_one_rank_alone_is_an_error_on_all() -> None:
    first, second = told_by(_fails_alone)
    for one in (first, second):
        assert one.error.startswith("CaptureError: each rank holds a part of this model")
        assert "Its own capture was refused" in one.error
    assert "failed on rank 1" in first.error


def _by_another_way(rank: int) -> None:
    blocks_of_shards(rank, budget="70%", dynamic=True)(torch.randn(8, 16))


def test_shards_by_a_way_in_which_ranks_choose_alone_are_refused() -> None:
    for one in told_by(_by_another_way):
        assert one.error.startswith("CaptureError: each rank holds a part of this model")
        assert "checkpoint(train_step, model, optimizer, batch" in one.error
