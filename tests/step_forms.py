"""Training steps as people write them, on batches of (inputs, labels), for tests of profiler and rewriter alike."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def plain(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def accumulating(model, optimizer, batch):
    optimizer.zero_grad()
    total = 0.0
    for inputs, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        loss = loss_of(model, (inputs, labels)) / 2
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def clipping(model, optimizer, batch):
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss, norm


def autocast(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss


def by_autograd_grad(model, optimizer, batch):
    params = list(model.parameters())
    loss = loss_of(model, batch)
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    optimizer.step()
    return loss


def returning_more(model, optimizer, batch):
    optimizer.zero_grad()
    logits = model(batch[0])
    loss = F.cross_entropy(logits, batch[1])
    loss.backward()
    optimizer.step()
    correct = (logits.argmax(1) == batch[1]).sum()
    return {"loss": loss, "more": (logits, correct, "text", 3), "batch": batch[0]}


def clearing_at_the_end(model, optimizer, batch):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


FORMS = [plain, accumulating, clipping, autocast, by_autograd_grad, returning_more, clearing_at_the_end]


class RunningMean(nn.Module):
    """Its forward replaces a buffer by a new tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


class Averaged(nn.Module):
    """It keeps an average of its weights, for `averaging` to move."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("average", self.layer.weight.detach().clone())

    def forward(self, x):
        return self.layer(x)


def averaging(model, optimizer, batch):
    """The ordinary step on an `Averaged`; after the update its average follows, and the weights are clamped."""
    loss = plain(model, optimizer, batch)
    with torch.no_grad():
        model.average.lerp_(model.layer.weight, 0.1)
        model.layer.weight.clamp_(-0.3, 0.3)
    return loss
