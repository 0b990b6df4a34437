"""A plan made once and used again: no strategy runs the second time.

The first run plans and saves. Every later run captures and measures the step, checks that the plan was made for the
same graph, and replays it. A plan for another model, batch or optimizer is refused with a sentence, never bent to fit.
The graph beside it is for planning elsewhere, without torch or the model: `python -m bench --graph out/graph.json`.

    python bench/examples/save_and_reuse_plan.py --out out/
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from planner.errors import FileFormatError
from rewriter import CheckpointedStep, checkpoint


def train_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def planned(depth: int, rows: int, *, budget: str, plan: Path | None = None) -> CheckpointedStep:
    """What a new run of your program does: everything made anew from the same seed."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return checkpoint(train_step, model, optimizer, torch.randn(rows, 32), budget=budget, plan=plan)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="70%", help="as for checkpoint(): '4GiB', '70%%'")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="in a batch")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for plan.json and graph.json")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "plan.json"

    first = planned(options.depth, options.rows, budget=options.budget)
    first.save(file)
    first.solution.problem.graph.save(options.out / "graph.json")
    print(f"planned in {first.solution.solve_s:.2f} s: {first.solution}")
    print(f"written: {file}, {options.out / 'graph.json'}")

    again = planned(options.depth, options.rows, budget=options.budget, plan=file)
    print(f"used again, after {again.solution.solve_s:.2f} s: {again.solution}")
    assert again.solution.schedule == first.solution.schedule

    try:
        planned(options.depth + 1, options.rows, budget=options.budget, plan=file)
    except FileFormatError as refused:
        print(f"for a deeper model: {refused}")


if __name__ == "__main__":
    main()
