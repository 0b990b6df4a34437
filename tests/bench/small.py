"""Steps that are captured, measured and run in a moment, for `--import tests.bench.small:make`."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from bench.workloads.zoo import classify

WIDTH, TOKENS = 32, 16


class Pooled(nn.Module):
    """The mean over tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def network() -> nn.Module:
    """Equal blocks of linear layer, in-place ReLU and dropout: at batch 8 activations make the peak, at 1 gradients."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2))]
    return nn.Sequential(*blocks, Pooled(), nn.Linear(WIDTH, 4))


def make(batch_size: int):
    """The network with SGD, as a plain tuple, as users write it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return classify, model, optimizer, (torch.randn(batch_size, TOKENS, WIDTH), torch.randint(0, 4, (batch_size,)))


class BasicBlock(nn.Sequential):
    """A block that peers know by its name, with statistics that must not be updated twice."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(TOKENS), nn.ReLU())


def make_blocks(batch_size: int):
    """The same of blocks."""
    step, _, _, batch = make(batch_size)
    model = nn.Sequential(BasicBlock(), BasicBlock(), Pooled(), nn.Linear(WIDTH, 4))
    return step, model, torch.optim.SGD(model.parameters(), lr=0.05), batch


def make_never_clearing(batch_size: int):
    """The same with a step that leaves its gradients behind and never clears them."""
    return _never_clearing, *make(batch_size)[1:]


def make_never_clearing_with_gradients(batch_size: int):
    """... and that begins with some."""
    step, model, optimizer, batch = make_never_clearing(batch_size)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return step, model, optimizer, batch


def _never_clearing(model, optimizer, batch):
    images, labels = batch
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss
