"""Lightning's automatic optimization under a budget: plan the network inside of the module.

`configure_model` is where Lightning lets a module change its network before training; planned in place there, it is
trained by `Trainer.fit` as ever.

    python bench/examples/lightning_loop.py --budget 80%
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.utils.data import DataLoader, TensorDataset

from bench.workloads.zoo import declare_torchvision_ops
from rewriter import checkpoint_model


def network() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def classifier(budget: str | None) -> Any:
    """A LightningModule; without a budget as it is."""
    import pytorch_lightning as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if budget is not None and getattr(self.network, "planned", None) is None:
                checkpoint_model(self.network, budget=budget)

        def training_step(self, batch: Any, _: int) -> Any:
            inputs, labels = batch
            loss = F.cross_entropy(self.network(inputs), labels)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    return Classifier()


def train(budget: str | None, *, rows: int) -> tuple[list[float], Any]:
    """The losses of all steps, and the network."""
    import pytorch_lightning as lightning

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    module = classifier(budget)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=2,
    )  # fmt: skip
    data = TensorDataset(torch.randn(6 * rows, 16), torch.arange(6 * rows) % 4)
    trainer.fit(module, DataLoader(data, batch_size=rows))
    return module.losses, module.network


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="80%", help="as for checkpoint_model(): '4GiB', '80%%'")
    parser.add_argument("--rows", type=int, default=512)
    options = parser.parse_args(arguments)

    declare_torchvision_ops()  # torchmetrics asks for torchvision, which may be built for another torch
    losses, model = train(options.budget, rows=options.rows)
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    print(model.planned.solution)
    print(model.planned.verification)


if __name__ == "__main__":
    main()
