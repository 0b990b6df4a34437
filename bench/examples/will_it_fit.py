"""Will it train on a GPU that is not here, at which batch, and at what cost?

Capturing takes no memory and planning no GPU, so batch, card and plan can be chosen before anything is rented. `make`
is a function from a batch size to (train_step, model, optimizer, batch); it is called at a few sizes, with tensors that
have no memory. Peaks come from the shapes; times are estimates from datasheets, never measured.

    python bench/examples/will_it_fit.py --gpu T4 --batch 300000

On the command line: `python -m bench fit --import my_package.train:make --batch 32 --gpu RTX3090`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.fit import fit
from planner.units import human_bytes
from profiler.workload import Workload


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def make(batch_size: int, *, depth: int, width: int) -> Workload:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return Workload(train_step, model, optimizer, torch.randn(batch_size, width))  # a plain tuple of the four will do


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="T4", help="a known device, or a file of your own: my_card.toml")
    parser.add_argument("--batch", type=int, default=300_000)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each plan; more for larger models")
    options = parser.parse_args(arguments)

    sized = partial(make, depth=options.depth, width=options.width)
    report = fit(sized, device=options.gpu, batch=options.batch, name="the network", time_limit_s=options.seconds)
    print(report.verdict)
    for kind, nbytes in report.by_role:
        print(f"  {kind}: {human_bytes(nbytes)} at the peak")
    for row in report.largest:
        within = "at any cost" if row.limit is None else f"within {row.limit:.0%} more time"
        print(f"largest batch {within}: {row.found.batch if row.found else 'none'}")
    for gpu in report.gpus:
        print(f"{gpu.device}: {gpu.answer}")


if __name__ == "__main__":
    main()
