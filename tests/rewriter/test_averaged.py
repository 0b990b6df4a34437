"""A plain model with `process_group`: means of gradients inside the plan, DistributedDataParallel's to the bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from profiler.errors import CaptureError
from rewriter import checkpoint
from tests.ranks import assert_predicted, on_ranks, told_by
from tests.rewriter.test_replicas import Net, batch_of, clipped, sgd


def accumulated(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Two backwards, each of which leaves means, and clipping."""
    optimizer.zero_grad()
    for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        loss = cross_entropy(model(x), y)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def planned(step: Any, model: Any, batch: Any, **options: Any) -> Any:
    group = {"process_group": dist.group.WORLD, "budget": "70%", "strategy": "mutwo", "show_progress": False}
    return checkpoint(step, model, sgd(model.parameters()), batch, **group, **options)


def made(rank: int, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    model = Net()
    torch.manual_seed(1000 + rank)
    return model


def _proven(rank: int) -> tuple[Any, ...]:
    """The proof of a planned step, and what it and eager replicas train to from there."""
    ours = made(rank)
    found = planned(accumulated, ours, batch_of(rank), verify=2)
    collectives = [word.split()[0] for word in found._forms[0].planned.collectives]
    for seed in range(3):
        found(batch_of(rank, seed=seed))
    eager = DistributedDataParallel(made(rank), broadcast_buffers=False)
    optimizer = sgd(eager.parameters())
    for seed in range(3):
        accumulated(eager, optimizer, batch_of(rank, seed=seed))
    pairs = zip((*ours.parameters(), *ours.buffers()), (*eager.parameters(), *eager.buffers()), strict=True)
    return found.verification, found.solution.dropped, collectives, [torch.equal(a, b) for a, b in pairs]


def test_a_plain_model_averages_its_gradients_to_the_bits_of_eager_replicas_and_fits_its_budget() -> None:
    parameters = len(list(Net().parameters()))
    for proof, dropped, collectives, equal in on_ranks(_proven):
        assert all(equal)
        assert proof.exact
        assert_predicted(proof.prediction_error)
        assert proof.measured_peak_bytes < 0.8 * proof.eager_peak_bytes
        assert dropped
        assert collectives.count("all_reduce_") == 2 * parameters, "one a parameter after each of two backwards"
        assert "broadcast_" not in collectives, "buffers stay each rank's own"


def _other_values(rank: int) -> None:
    planned(clipped, made(rank, seed=rank), batch_of(rank))


def test_ranks_that_begin_with_other_values_are_told_so() -> None:
    for one in told_by(_other_values):
        assert one.error.startswith("RankError: the set of parameters of rank 1 differs from rank 0's")
        assert "broadcast" in one.error


def _wrapped(rank: int) -> None:
    planned(clipped, DistributedDataParallel(made(rank)), batch_of(rank))


def test_a_wrapped_model_with_a_process_group_is_refused() -> None:
    for one in told_by(_wrapped):
        assert one.error.startswith("CaptureError: process_group is for a plain model")


def _not_a_rank(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        return ""
    try:
        checkpoint(clipped, made(rank), None, batch_of(rank), budget="70%", process_group=group)
    except CaptureError as error:
        return str(error)
    return ""


def test_a_process_that_is_no_rank_of_the_group_is_told_so() -> None:
    _, second = on_ranks(_not_a_rank)
    assert second.startswith("this process is no rank of process_group")
