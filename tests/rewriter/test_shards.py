"""fully_shard inside the plan: bits and bytes on every rank, gathers run again, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from planner.analysis import candidates
from planner.plan import Plan, recompute_once
from planner.solve import Problem
from profiler.tracing.ranks import sharded as gathering
from rewriter import checkpoint
from rewriter.step import CheckpointedStep
from tests.ranks import assert_predicted, on_ranks

WIDTH, WORDS = 30, 41  # neither is even for two ranks in all of its uses


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.gate = nn.Linear(WIDTH, 45, bias=False), nn.Linear(WIDTH, 45, bias=False)
        self.down, self.dropout = nn.Linear(45, WIDTH, bias=False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(seen))
        y = self.between(x)
        return x + self.dropout(self.down(silu(self.gate(y)) * self.up(y)))


class Decoder(nn.Module):
    """A small Llama with tied embeddings, and a scale of which all ranks but the first hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)) * self.scale
        return out


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


SMALL_BYTES = 4000  # norms and some weights below it, other weights above it


def sharded(rank: int, make_optimizer: Any = adamw, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    gathering.SMALL_BYTES = SMALL_BYTES  # of this rank, a process of its own
    torch.manual_seed(0)
    model = Decoder()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1000 + rank)
    return model, optimizer


def tokens(rank: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (8, 12), generator=torch.Generator().manual_seed(10 * seed + rank))


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def accumulated(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    """Two micro-steps, each of which reduces, and clipping."""
    optimizer.zero_grad()
    losses = []
    for part in batch.chunk(2):
        loss = loss_of(model, part)
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return torch.stack(losses)


def plain(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def planned(step: Any, model: Any, optimizer: Any, batch: Any, **options: Any) -> CheckpointedStep:
    options = {"budget": "70%", "strategy": "mutwo", "show_progress": False, **options}
    return checkpoint(step, model, optimizer, batch, **options)


# -- equal to the bit -----------------------------------------------------------------------------------------------


def _proven(rank: int) -> tuple[Any, ...]:
    model, optimizer = sharded(rank)
    found = planned(accumulated, model, optimizer, tokens(rank), verify=2, budget="60%", strategy="auto:seconds=2")
    again = [node.name for node in found.module.graph.nodes if "_again" in node.name]
    form = found._forms[0]
    return found.verification, form.ready.traced.opaque_reason, again, form.planned.collectives, found.timeline()


def test_a_planned_step_of_shards_is_eagers_to_the_bit_on_every_rank() -> None:
    for proof, opaque_reason, again, collectives, timeline in on_ranks(_proven):
        assert proof.exact
        assert_predicted(proof.prediction_error)
        assert proof.measured_peak_bytes < 0.7 * proof.eager_peak_bytes
        assert timeline.hidden_us > 0, "launched earlier than waited for"
        assert opaque_reason == "", "the optimizer steps its shards inside the graph"
        assert not any(name.startswith(("reduce", "all_reduce")) for name in again)
        assert sum(word.startswith("all_reduce_ ") for word in collectives) == 6, "three units, twice, gloo's way"
        parameters = len(list(Decoder().parameters()))
        gathers = sum(word.startswith("all_gather") for word in collectives) - sum(
            "all_gather" in name for name in again
        )
        assert 6 < gathers < 2 * parameters, "small ones of a unit together, large ones alone"


class Again(nn.Module):
    """A block that is called three times before another, each of them a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.once = Block(), Block()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in (self.often, self.often, self.once, self.often):
            x = block(x)
        out: Tensor = self.head(x)
        return out


def _called_again(rank: int) -> list[bool]:
    """Units that a forward calls several times, an optimizer that runs as itself, evaluations between steps."""
    left = []
    for plans in (False, True):
        torch.manual_seed(0)
        model: Any = Again()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (model.often, model.once, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(1000 + rank)
        step = planned(plain, model, optimizer, tokens(rank), verify=False) if plans else None
        for seed in range(3):
            plain(model, optimizer, tokens(rank, seed)) if step is None else step(tokens(rank, seed))
            with torch.no_grad():  # which leaves the root's parameters whole
                model.eval()(tokens(rank))
            model.train()
        model.reshard()
        state = [value for p in model.parameters() for value in optimizer.state[p].values()]
        found = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
        left.append([t.to_local().detach().clone() if hasattr(t, "to_local") else t.clone() for t in found])
    return [torch.equal(a, b) for a, b in zip(*left, strict=True)]


def test_units_called_again_are_reduced_once_and_any_optimizer_steps_shards_between_evaluations() -> None:
    for equal in on_ranks(_called_again):
        assert all(equal)


class DropsWholeParameters:
    """Whole parameters are gathered again in the backward, and nothing else is: what others call ZeRO-3."""

    name: ClassVar[str] = "drops whole parameters"

    def plan(self, problem: Problem) -> Plan:
        graph = problem.graph
        made = [graph.maker[s] for s in range(len(graph.storages))]
        gathered = [s for s, op in enumerate(made) if op is not None and "all_gather" in graph.ops[op].target]
        return recompute_once(graph, set(gathered) & set(candidates(graph)))


def saved(model: Any, optimizer: Any, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: str) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def whole(model: Any, optimizer: Any) -> list[Tensor]:
    """Parameters and state as one process would hold them."""
    params = list(model.parameters())
    state = [value for p in params for value in optimizer.state[p].values() if isinstance(value, DTensor)]
    return [one.full_tensor().detach() for one in (*params, *state)]


def _resumed(rank: int, folder: str) -> tuple[bool, list[str], list[Tensor]]:
    """Two planned steps, saved; the third by the planned step, and by eager from what was saved."""
    model, optimizer = sharded(rank, sgd)
    step = planned(plain, model, optimizer, tokens(rank), strategy=DropsWholeParameters(), budget="97%")
    again = [node.name for node in step.module.graph.nodes if "_again" in node.name]
    for seed in (0, 1):
        step(tokens(rank, seed))
    drawn = torch.get_rng_state()
    saved(model, optimizer, folder)
    then = whole(model, optimizer)
    step(tokens(rank, 2))

    other, its_optimizer = sharded(rank, sgd)
    load(other, its_optimizer, folder)
    torch.set_rng_state(drawn)
    plain(other, its_optimizer, tokens(rank, 2))
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs), again, then


def _resumed_by_more(rank: int, folder: str) -> tuple[list[Tensor], Any]:
    """What another number of ranks loads, and the proof of a planned step that goes on from there."""
    model, optimizer = sharded(rank, sgd)
    load(model, optimizer, folder)
    then = whole(model, optimizer)
    return then, planned(plain, model, optimizer, tokens(rank), verify=1).verification


def test_what_a_planned_step_trains_is_saved_and_resumed_by_distributed_checkpoint_on_as_many_ranks_and_on_more(
    tmp_path: Path,
) -> None:
    of_ranks = on_ranks(_resumed, str(tmp_path))
    for is_equal, again, _ in of_ranks:
        assert is_equal
        assert sum(name.startswith("all_gather") for name in again) > 5, "whole parameters are gathered again"
    _, _, left = of_ranks[0]
    for found, proof in on_ranks(_resumed_by_more, str(tmp_path), ranks=3):
        assert len(found) == len(left)
        assert all(map(torch.equal, found, left))
        assert proof.exact
        assert_predicted(proof.prediction_error)
