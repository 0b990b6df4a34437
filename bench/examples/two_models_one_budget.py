"""Two models that share one budget by taking turns: a generator and a critic, a teacher and a student.

While one of them steps, the other only lies there: parameters, buffers, optimizer state, its batch. That is its
*start*, and each is planned with the whole budget less the start of the other. `free_gradients=True` ends every step
with `.grad` at None, so that no gradients lie there between the turns. At the end both take turns under the meter.

    python bench/examples/two_models_one_budget.py --share 60
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.simulator import unplanned
from planner.units import human_bytes
from profiler import capture
from profiler.measuring.meters import meter_for, peak_above_start
from rewriter import checkpoint


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def made(width: int, depth: int, rows: int) -> tuple[nn.Module, Optimizer, Tensor]:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(depth)]
    model = nn.Sequential(*blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.randn(rows, width)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=60, help="percent of what the larger step adds unplanned")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=512, help="in a batch")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    pair = [made(32, options.depth, options.rows), made(24, options.depth + 1, options.rows)]
    graphs = [capture(train_step, *one, free_gradients=True).graph for one in pair]
    starts = [graph.start_bytes for graph in graphs]
    added = max(unplanned(graph).above_start_bytes for graph in graphs)
    budget = sum(starts) + added * options.share // 100
    print(f"one budget of {human_bytes(budget)}, of which {human_bytes(sum(starts))} lie there between the turns")

    first, second = (
        checkpoint(train_step, *one, budget=budget - other, free_gradients=True)
        for one, other in zip(pair, reversed(starts), strict=True)
    )
    print(first.solution)
    print(second.solution)

    def turns() -> None:
        for _ in range(options.turns):
            first(pair[0][2])
            second(pair[1][2])

    turns()  # the first steps of a process make what stays
    measured = sum(starts) + peak_above_start(meter_for(torch.device("cpu")), turns)
    print(f"taking turns they need {human_bytes(measured)} of {human_bytes(budget)}")
    assert measured <= budget


if __name__ == "__main__":
    main()
