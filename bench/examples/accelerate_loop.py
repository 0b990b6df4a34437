"""A loop by Hugging Face's accelerate under a budget: plan the model, then prepare it as always.

`checkpoint_model` works in place, so that what `accelerator.prepare` gives back is planned, too: mixed precision,
accumulation by `accelerator.accumulate` and clipping go on as they did.

    python bench/examples/accelerate_loop.py --budget 80% --precision bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.utils.data import DataLoader, TensorDataset

from rewriter import checkpoint_model


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def train(budget: str | None, *, precision: str, accumulate: int, rows: int) -> tuple[list[float], Any]:
    """The losses of all micro-steps, and the model; without a budget as it is."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
    model = network()
    if budget is not None:
        checkpoint_model(model, budget=budget)
    data = TensorDataset(torch.randn(6 * rows, 16), torch.arange(6 * rows) % 4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=rows))
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(prepared):
            loss = F.cross_entropy(prepared(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="80%", help="as for checkpoint_model(): '4GiB', '80%%'")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args(arguments)

    losses, model = train(options.budget, precision=options.precision, accumulate=options.accumulate, rows=options.rows)
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print(model.planned.solution)
    print(model.planned.verification)


if __name__ == "__main__":
    main()
