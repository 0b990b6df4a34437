"""Your own training loop under a memory budget: only the call of the step changes.

`checkpoint()` takes the step function that you have (forward, backward, `optimizer.step()`) and gives back one that
does the same arithmetic within the budget. All around it stays yours and alive: the loader, the learning-rate schedule,
evaluation between epochs, saving. The loader drops its last, smaller batch, because a batch of another shape would be
captured and planned for itself.

    python bench/examples/own_loop.py --budget 60% --epochs 3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from rewriter import checkpoint

Batch = Sequence[Tensor]


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    """An ordinary step: nothing in it knows of the plan."""
    images, labels = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def network(depth: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def pictures(count: int) -> TensorDataset:
    """Pictures of noise, brighter the higher their class."""
    labels = torch.arange(count) % 4
    return TensorDataset(torch.randn(count, 3, 16, 16) + labels.view(-1, 1, 1, 1), labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Evaluation runs the plain model: it is the same object, and always current."""
    images, labels = data.tensors
    model.eval()
    right = (model(images).argmax(1) == labels).float().mean()
    model.train()
    return float(right)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="60%", help="as for checkpoint(): '4GiB', '60%%'")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = network(options.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    loader = DataLoader(pictures(4 * options.batch + 1), batch_size=options.batch, shuffle=True, drop_last=True)
    held_out = pictures(32)

    step = checkpoint(train_step, model, optimizer, next(iter(loader)), budget=options.budget)
    print(step.solution)
    print(step.verification)

    for epoch in range(options.epochs):
        for batch in loader:
            loss = step(batch)
        rate = scheduler.get_last_lr()[0]
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy(model, held_out):.0%}, learning rate {rate:g}")
        scheduler.step()


if __name__ == "__main__":
    main()
