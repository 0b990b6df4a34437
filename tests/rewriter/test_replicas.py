"""DistributedDataParallel inside the plan: bits and bytes on every rank, batches that differ, budgets in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.workloads.zoo import declare_torchvision_ops
from rewriter import OverBudget, checkpoint
from rewriter.step import CheckpointedStep
from tests.profiler import library_models
from tests.ranks import assert_predicted, on_ranks

SMALL_BUCKETS_MB = 0.012


class Net(nn.Module):
    """Linear blocks with dropout, and a batch norm whose buffers are broadcast."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(blocks)
        )
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, back in zip(self.blocks, self.back, strict=True):
            x = x + back(block(x))
        out: Tensor = self.last(self.norm(x))
        return out


def clipped(model: Any, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def batch_of(rank: int, rows: int = 96, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(rows, 16, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def wrapped(rank: int, make_optimizer: Any = sgd, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=SMALL_BUCKETS_MB, **options)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1000 + rank)  # from here on every rank draws its own dropout
    return model, optimizer


def planned(step: Any, model: Any, optimizer: Any, batch: Any, **options: Any) -> CheckpointedStep:
    options = {"budget": "70%", "strategy": "mutwo", "show_progress": False, **options}
    return checkpoint(step, model, optimizer, batch, **options)


# -- equal to the bit -----------------------------------------------------------------------------------------------


def residual_net() -> Any:
    """ResNet-18 with batch norms, whose buffers rank 0 broadcasts."""
    declare_torchvision_ops()
    from torchvision.models import resnet18

    return resnet18(num_classes=4)


def unclipped(model: Any, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def images(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(24, 3, 32, 32, generator=generator), torch.randint(0, 4, (24,), generator=generator)


def small_bert() -> Any:
    library = library_models.transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return library.BertForMaskedLM(library.BertConfig(**sizes, vocab_size=60, max_position_embeddings=32))


def sentences(rank: int) -> Tensor:
    return torch.randint(0, 60, (8, 16), generator=torch.Generator().manual_seed(rank))


def accumulated_and_clipped(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    """Two micro-steps of which the last one alone reduces."""
    optimizer.zero_grad()
    first, second = batch.chunk(2)
    with model.no_sync():
        model(input_ids=first, labels=first).loss.backward()
    loss: Tensor = model(input_ids=second, labels=second).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _proven(rank: int, make: Any, batches: Any, step: Any, make_optimizer: Any, budget: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model = DistributedDataParallel(make().train(), bucket_cap_mb=8 if make is residual_net else SMALL_BUCKETS_MB)
    optimizer = make_optimizer(model.parameters())
    torch.manual_seed(1000 + rank)
    found = planned(step, model, optimizer, batches(rank), verify=1 + (make is Net), budget=budget)
    collectives = [word.split()[0] for word in found._forms[0].planned.collectives]
    return found.verification, collectives, found.solution, {buffer.dtype for buffer in model.buffers()}


@pytest.mark.parametrize(
    ("make", "batches", "step", "make_optimizer", "budget", "ranks"),
    [
        (Net, batch_of, clipped, sgd, "70%", 4),
        (small_bert, sentences, accumulated_and_clipped, adamw, "85%", 2),
        (residual_net, images, unclipped, sgd, "93%", 2),
    ],
)
def test_a_planned_step_of_replicas_is_eagers_to_the_bit_on_every_rank(
    make: Any, batches: Any, step: Any, make_optimizer: Any, budget: str, ranks: int
) -> None:
    make()  # what this imports, ranks have
    of_ranks = on_ranks(_proven, make, batches, step, make_optimizer, budget, ranks=ranks)
    for proof, collectives, solution, types in of_ranks:
        assert proof.exact
        assert_predicted(proof.prediction_error)
        assert proof.measured_peak_bytes < proof.eager_peak_bytes * (0.8 if make is Net else 0.95)
        assert solution.dropped
        assert collectives.count("all_reduce_") > 2, "the buckets of one backward"
        assert collectives.count("broadcast_") == len(types), "one for each type of buffer, once a synchronised step"


def left_by(model: Any) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def _trained(rank: int, rows: list[int], folder: str) -> list[list[Tensor]]:
    """What a few steps leave: by the planned step, by eager from where that was saved before the last, and by eager."""
    left = []
    batches = [batch_of(rank, rows[rank] if i == 2 else 96, seed=i) for i in range(4)]
    for plans in (True, False):
        model, optimizer = wrapped(rank)
        for batch in batches[:2]:  # the reducer keeps the buckets that it has from its second step on
            clipped(model, optimizer, batch)
        step: Any = planned(clipped, model, optimizer, batches[0], verify=False) if plans else None
        for batch in batches[:3]:
            step(batch) if plans else clipped(model, optimizer, batch)
        if plans:
            drawn = torch.get_rng_state()
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        step(batches[3]) if plans else clipped(model, optimizer, batches[3])
        left.append(left_by(model))
        if plans:
            model, optimizer = wrapped(rank)
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            torch.set_rng_state(drawn)
            clipped(model, optimizer, batches[3])
            left.append(left_by(model))
    return left


@pytest.mark.filterwarnings("ignore:this step is captured and planned anew")
def test_replicas_with_a_ragged_batch_of_one_rank_alone_are_planned_on_all_and_saved_and_resumed(
    tmp_path: Path,
) -> None:
    of_ranks = on_ranks(_trained, [96, 40], str(tmp_path))
    parameters = len(list(Net().parameters()))
    for ours, resumed, eagers in of_ranks:
        assert all(map(torch.equal, ours, eagers))
        # Of buffers each rank has its own until the next forward, and it is left open whose are saved.
        assert all(map(torch.equal, ours[:parameters], resumed[:parameters]))
    assert all(map(torch.equal, of_ranks[0][0][:parameters], of_ranks[1][0][:parameters]))


def _around_no_sync(rank: int) -> list[bool]:
    """Micro-steps of which only the last one reduces, each a call of one planned step."""
    equal = []
    found: list[list[Tensor]] = []
    for plans in (True, False):
        model, optimizer = wrapped(rank)

        def forward_backward(model: Any, _: Any, batch: Any) -> Tensor:
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss.detach()

        for _ in range(2):
            forward_backward(model, None, batch_of(rank))
        optimizer.zero_grad()
        step: Any = lambda batch, m=model: forward_backward(m, None, batch)  # noqa: E731
        if plans:
            step = planned(forward_backward, model, None, batch_of(rank), verify=False, budget="85%")
        with model.no_sync():
            step(batch_of(rank, seed=1))
        step(batch_of(rank, seed=2))
        found.append([p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()])
        equal.append(model.require_forward_param_sync)
    return [*equal, all(map(torch.equal, found[0], found[1]))]


@pytest.mark.filterwarnings("ignore:this step is captured and planned anew")
def test_no_sync_around_calls_of_the_planned_step_accumulates_as_in_eager() -> None:
    for seen in on_ranks(_around_no_sync):
        assert all(seen)


def zeroed(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Gradients stay where they are from step to step."""
    optimizer.zero_grad(set_to_none=False)
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def in_bfloat16(model: Any, optimizer: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss.detach()


def _other_forms(rank: int, folder: str) -> list[tuple[bool, float, int]]:
    """Whether each is exact, how far its peak is from the predicted one, and how many tensors it moves to files."""
    found = []
    moving = {"host_link": 1000, "offload_dir": folder, "strategy": "offload_only"}
    for step, wrapping, options in (
        (zeroed, {"gradient_as_bucket_view": True}, {}),
        (in_bfloat16, {}, {"free_gradients": True, "early_updates": True}),
        (clipped, {}, moving),
    ):
        model, optimizer = wrapped(rank, **wrapping)
        for _ in range(2):
            step(model, optimizer, batch_of(rank))
        one = planned(step, model, optimizer, batch_of(rank), verify=2, budget="80%", **options)
        proof = one.verification
        assert proof is not None
        found.append((proof.exact, proof.prediction_error, len(one.solution.moved)))
    return found


def test_gradients_that_stay_or_go_early_and_moves_to_a_host_are_eagers_to_the_bit(tmp_path: Path) -> None:
    for proofs in on_ranks(_other_forms, str(tmp_path)):
        for exact, error, _ in proofs:
            assert exact
            assert_predicted(error)
        assert [moved > 0 for _, _, moved in proofs] == [False, False, True]
    assert not list(tmp_path.iterdir()), "files are gone when the ranks are"


# -- budgets in bytes -----------------------------------------------------------------------------------------------


def _in_bytes(rank: int) -> tuple[str, int]:
    model, optimizer = wrapped(rank)
    try:
        planned(clipped, model, optimizer, batch_of(rank), budget="60KiB", verify=False)
    except OverBudget as error:
        return str(error), sum(p.numel() * 4 for p in model.parameters())
    return "", 0


def test_a_budget_in_bytes_counts_the_buckets_that_the_reducer_holds() -> None:
    for said, bucket_bytes in on_ranks(_in_bytes):
        assert f"{bucket_bytes / 2**10:.1f} KiB of tensors outside of the plan" in said
