"""One rank of the measurement: `torchrun ... -m bench.experiments.distributed.worker`, which `run.py` starts."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as recomputed

from bench.experiments.distributed.rows import DistributedRow
from bench.workloads.zoo import ZOO, MakeOptimizer, fused_adamw
from planner.errors import PlannerError
from planner.files import encode
from profiler.measuring.meters import meter_for, peak_above_start
from profiler.workload import Workload
from rewriter import checkpoint

# Small enough for two processes of one machine, with what makes training on several hard: buffers, dropout, tied and
# uneven weights.
MODELS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "resnet18": (64, "sgd", {"image": 64}),
    "bert": (16, "adamw", {"seq": 64, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
                           "intermediate_size": 384, "vocab_size": 501}),
}  # fmt: skip

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),  # shards have no fused form of it
    "adamw": fused_adamw,
}

DDP, FSDP2 = "DDP", "FSDP2"
WARM_UP = 3  # after which the reducer keeps its buckets


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts that are sharded, or recomputed, one by one: the entries of the model's lists of modules."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    inside = {id(part) for one in lists for entry in one for part in entry.modules()}
    return [entry for one in lists if id(one) not in inside for entry in one if any(True for _ in entry.parameters())]


def made(model: str, how: str, rank: int, *, recompute: bool = False) -> Workload:
    """A model on all ranks with this rank's own batch: as replicas or shards, its blocks recomputed or not."""
    batch_size, optimizer, sizes = MODELS[model]
    step, network, _, _ = ZOO[model](batch_size, optimizer=OPTIMIZERS[optimizer], **sizes)
    _, _, _, batch = ZOO[model](batch_size, optimizer=OPTIMIZERS[optimizer], seed=rank + 1, **sizes)
    blocks = blocks_of(network)
    for block in blocks if recompute else ():
        block.forward = partial(recomputed, block.forward, use_reentrant=False)
    shared: Any = network
    if how == DDP:
        shared = nn.parallel.DistributedDataParallel(network)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
    torch.manual_seed(100 + rank)
    return Workload(step, shared, OPTIMIZERS[optimizer](list(shared.parameters())), batch)


@dataclass(kw_only=True)
class _Way:
    """Something that trains, and what was found of it."""

    name: str
    budget: str
    run: Callable[[], Any]
    peak_bytes: int = 0
    seconds: list[float]
    exact: bool | None = None
    prediction_error: float | None = None
    refused: str = ""


def ways_of(model: str, rank: int, budgets: Sequence[str]) -> list[_Way]:
    """All that is compared on one model."""
    found = []
    for how in (DDP, FSDP2):
        found.append(_eager(how, made(model, how, rank)))
        if how == FSDP2:
            found.append(_eager(f"{how} + torch.utils.checkpoint", made(model, how, rank, recompute=True)))
        found += [_planned(f"{how} planned", made(model, how, rank), budget) for budget in budgets]
    return found


def _eager(name: str, workload: Workload) -> _Way:
    return _Way(name=name, budget="", run=workload.run_once, seconds=[])


def _planned(name: str, workload: Workload, budget: str) -> _Way:
    for _ in range(WARM_UP):
        workload.run_once()
    way = _Way(name=name, budget=budget, run=workload.run_once, seconds=[])
    try:
        step = checkpoint(*workload, budget=budget, show_progress=False)
    except PlannerError as error:  # on all ranks alike: a row of the table
        way.refused = str(error)
        return way
    assert step.verification is not None
    way.run = partial(step, workload.batch)
    way.exact, way.prediction_error = step.verification.exact, step.verification.prediction_error
    return way


def measured(model: str, rank: int, budgets: Sequence[str], *, pairs: int) -> list[DistributedRow]:
    """Peaks and times of all ways on one model, timed in turn; all ranks call it together."""
    ways = ways_of(model, rank, budgets)
    running = [way for way in ways if not way.refused]
    for way in running:
        for _ in range(WARM_UP):
            way.run()
        way.peak_bytes = peak_above_start(meter_for(torch.device("cpu")), way.run)
    for _ in range(pairs):
        for way in running:
            dist.barrier()
            began = time.perf_counter()
            way.run()
            way.seconds.append(time.perf_counter() - began)
    return [_row(model, rank, way) for way in ways]


def _row(model: str, rank: int, way: _Way) -> DistributedRow:
    return DistributedRow(
        model=model,
        way=way.name,
        budget=way.budget,
        ranks=dist.get_world_size(),
        rank=rank,
        peak_bytes=way.peak_bytes,
        step_s=statistics.median(way.seconds) if way.seconds else 0.0,
        exact=way.exact,
        prediction_error=way.prediction_error,
        refused=way.refused,
    )


def main(folder: str, models: str, budgets: str, pairs: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    rows = [row for model in models.split(",") for row in measured(model, rank, budgets.split(","), pairs=int(pairs))]
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(encode(rows)), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
