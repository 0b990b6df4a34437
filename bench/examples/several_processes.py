"""Replicas or shards under a memory budget: the same call on every process, and one plan for all of them.

The model is wrapped as always, in DistributedDataParallel or by `fully_shard`, and `checkpoint()` takes it so. What the
processes send each other becomes part of the plan: of a sharded model it decides which parameters stay whole until the
backward and which are gathered again. Each process has its own batches; the last may be shorter on some of them.

    python bench/examples/several_processes.py --how replicas
    torchrun --nproc-per-node 2 bench/examples/several_processes.py --how shards --budget 60%
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from rewriter import checkpoint

WAYS = ("replicas", "shards")


def train_step(model: Any, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """An ordinary step: the model communicates, as it would without a plan."""
    optimizer.zero_grad()
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def network(width: int, depth: int) -> nn.Sequential:
    def block() -> nn.Sequential:
        inside = nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        return nn.Sequential(*inside, nn.LayerNorm(width))

    blocks = [block() for _ in range(depth)]
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def shared(model: nn.Sequential, how: str) -> Any:
    """The model on all processes: whole on each of them, or in parts."""
    if how == "replicas":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches(rank: int, rows: int, width: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """This process's share of made data; the last batch of the first process alone is shorter."""
    draw = torch.Generator().manual_seed(rank)
    sizes = [rows] * (count - 1) + [rows if rank else rows // 2]
    return [(torch.randn(n, width, generator=draw), torch.randint(0, 10, (n,), generator=draw)) for n in sizes]


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)  # the same weights everywhere
    model = shared(network(options.width, options.depth), options.how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)  # another dropout on each
    data = batches(rank, options.batch, options.width, options.steps)
    step = checkpoint(train_step, model, optimizer, data[0], budget=options.budget, show_progress=False)
    said = f"rank {rank}: {step.solution}\nrank {rank}: {step.verification}"
    losses = [float(step(batch)) for batch in data]
    print(f"{said}\nrank {rank}: {len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=WAYS, default="shards")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "this step is captured and planned anew")  # for the shorter batch, as meant
    with tempfile.TemporaryDirectory() as folder:
        if dist.is_torchelastic_launched():
            dist.init_process_group("gloo")
        else:  # by itself, for a first look
            dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        try:
            train(options)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
