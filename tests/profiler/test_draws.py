"""Activation checkpointing inside a model draws its random numbers twice: the graph draws them once, and is eager's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from planner.simulator import unplanned
from profiler.errors import CaptureError
from profiler.ops import is_random
from profiler.tracing.whole_step import capture
from rewriter import checkpoint
from tests.side_by_side import assert_same, eager, history, seeded


class Blocks(nn.Module):
    """Blocks with dropout, each run again in the backward; the last one draws in other ways, too."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16)) for _ in range(3)
        )
        self.reentrant = reentrant

    def forward(self, x):
        x = x.requires_grad_() if self.reentrant else x
        for block in self.blocks:
            x = x + recomputed(block, x, use_reentrant=self.reentrant)
        return recomputed(lambda y: y * torch.rand_like(y) + torch.randn(16), x, use_reentrant=self.reentrant)


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch.clone()).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item(), torch.rand(2)


def workload(reentrant):
    def make():
        model = Blocks(reentrant=reentrant)
        return train, model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(400, 16)

    return make


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("budget", ["100%", "75%"])
def test_dropout_inside_of_activation_checkpointing_is_eagers_to_the_bit(reentrant, budget):
    make = workload(reentrant)
    planned = seeded(make)
    step = checkpoint(*planned, budget=budget, strategy="mutwo", show_progress=False)
    assert_same(eager(seeded(make), steps=3), history(step, planned, steps=3))


def test_every_number_is_drawn_once_in_the_graph():
    traced = capture(*seeded(workload(reentrant=False)))
    assert sum(map(is_random, traced.nodes)) == 3 + 2 + 1  # dropouts, the last block's two, the step's own
    assert unplanned(traced.graph).peak_bytes


def seeding(model, optimizer, batch):
    torch.manual_seed(3)
    return train(model, optimizer, batch)


def rewinding(model, optimizer, batch):
    state = torch.get_rng_state()
    noise = torch.rand(400, 16)
    torch.set_rng_state(state)
    return train(model, optimizer, batch + noise * torch.randn(400, 16))


def left_behind(model, optimizer, batch):
    state = torch.get_rng_state()
    result = train(model, optimizer, batch)
    torch.set_rng_state(state)
    return result


@pytest.mark.parametrize("step", [seeding, rewinding, left_behind])
def test_draws_that_a_graph_cannot_repeat_are_refused(step):
    _, *rest = seeded(workload(reentrant=False))
    with pytest.raises(CaptureError, match="the state of the random generator"):
        capture(step, *rest)
