"""Tensor parallel inside the plan: slices by columns and rows, their activations recomputed, their sums sent once."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu

from rewriter import checkpoint, checkpoint_model
from tests.ranks import assert_predicted, on_ranks
from tests.rewriter.test_replicas import adamw, sgd

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(x)))


def sliced() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(seed: int = 0) -> Tensor:
    """The same on all ranks: they share the work on it."""
    return torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(seed))


def clipped(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _proven(rank: int) -> tuple[Any, ...]:
    model = sliced()
    options = {"budget": "70%", "strategy": "mutwo", "verify": 2, "show_progress": False}
    step = checkpoint(clipped, model, adamw(model.parameters()), batch(), **options)
    again = [node.name for node in step.module.graph.nodes if "_again" in node.name]
    return step.verification, again, step._forms[0].planned.collectives


def test_a_planned_step_of_slices_is_eagers_to_the_bit_on_every_rank() -> None:
    for proof, again, collectives in on_ranks(_proven):
        assert proof.exact
        assert_predicted(proof.prediction_error)
        assert proof.measured_peak_bytes < 0.75 * proof.eager_peak_bytes
        assert again
        assert not any(name.startswith("all_reduce") for name in again), "sums are sent once"
        assert sum(f"[256, {WIDTH}]" in word for word in collectives) == 5, "three forwards, two backwards"


def _in_any_loop(rank: int) -> tuple[bool, Any]:
    left = []
    for plans in (False, True):
        model = sliced()
        if plans:
            checkpoint_model(model, budget="70%", strategy="mutwo")
        optimizer = sgd(model.parameters())
        for i in range(3):
            optimizer.zero_grad()
            loss = (model(batch(i)) @ torch.ones(WIDTH, 1)).square().mean()  # small beside the model
            loss.backward()
            if loss.item() > 0:  # the loop is live Python
                optimizer.step()
        left.append([t.to_local().detach().clone() for p in model.parameters() for t in (p, p.grad)])
    return all(map(torch.equal, *left)), model.planned.verification


def test_slices_are_planned_in_any_loop() -> None:
    for is_equal, proof in on_ranks(_in_any_loop):
        assert is_equal
        assert proof.exact
        assert_predicted(proof.prediction_error)
