"""One rank of a planned step on two: `torchrun ... -m bench.experiments.acceptance_ranks`, started by `two_ranks`.

By gloo on a CPU, by NCCL where there are two GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.experiments.distributed.run import under_torchrun
from bench.workloads.spec import moved
from bench.workloads.zoo import ZOO, fused_adamw
from profiler.backend import is_accelerator
from profiler.workload import Workload
from rewriter import checkpoint

RANKS = 2
MODEL = {"seq": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 101}
BATCH = 8
BUDGET = "80%"


def two_ranks(kind: str) -> list[str]:
    """What each rank says of a planned step that all of them proved; SeparateProcessError where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        under_torchrun(["-m", __name__, folder, kind], ranks=RANKS)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def _workload(device: torch.device, rank: int) -> Workload:
    """A replica of one model on this rank's device, with a batch of its own."""
    step, model, _, _ = ZOO["gpt2"](BATCH, optimizer=fused_adamw, **MODEL)
    *_, batch = ZOO["gpt2"](BATCH, optimizer=fused_adamw, seed=rank + 1, **MODEL)
    batch = moved(model, fused_adamw(list(model.parameters())), batch, device)
    replica = nn.parallel.DistributedDataParallel(model)
    return Workload(step, replica, fused_adamw(list(replica.parameters())), batch)


def main(folder: str, kind: str) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device(kind, rank) if is_accelerator(torch.device(kind)) else torch.device(kind)
    dist.init_process_group("nccl" if is_accelerator(device) else "gloo")
    workload = _workload(device, rank)
    for _ in range(3):  # after which its reducer keeps its buckets
        workload.run_once()
    step = checkpoint(*workload, budget=BUDGET, strategy="mutwo", verify=2, show_progress=False)
    for _ in range(3):
        step(workload.batch)
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(str(step.verification)), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
