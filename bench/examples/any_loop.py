"""Loops that stay as they are: only the model is planned, in place.

`checkpoint_model(model, budget=...)` plans forward and backward of a model; whatever goes on around it is ordinary
Python. Four loops that cannot be one captured step: a generator and its critic with two optimizers, mixed precision
with a gradient scaler, LBFGS with its closure, and batches of several lengths. Each is the loop that one would write
anyway; the call of `plan` is all that is new.

    python bench/examples/any_loop.py --loop gan --budget 80%
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's own name for it

from rewriter import checkpoint_model

Plan = Callable[[nn.Module], object]
WIDTH = 16


def network(outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, outputs))


def gan(plan: Plan, rows: int, steps: int) -> tuple[list[float], list[Any]]:
    """Two models, two optimizers; the generator's gradients go through the critic."""
    maker, critic = network(WIDTH), network(1)
    plan(maker), plan(critic)
    ours, theirs = (torch.optim.Adam(model.parameters(), 1e-3) for model in (maker, critic))
    losses = []
    for _ in range(steps):
        made = maker(torch.randn(rows, WIDTH))
        theirs.zero_grad()
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(torch.randn(rows, WIDTH) + 2)).mean()
        loss.backward()
        theirs.step()
        ours.zero_grad()
        gain = F.softplus(-critic(made)).mean()
        gain.backward()
        ours.step()
        losses += [loss.item(), gain.item()]
    return losses, [maker, critic]


def scaler(plan: Plan, rows: int, steps: int) -> tuple[list[float], list[Any]]:
    """Mixed precision; the scaler decides at run time whether the optimizer steps."""
    model = network(4)
    plan(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(torch.randn(rows, WIDTH)), torch.arange(rows) % 4)
        scaling.scale(loss).backward()
        scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model]


def lbfgs(plan: Plan, rows: int, steps: int) -> tuple[list[float], list[Any]]:
    """The optimizer calls forward and backward itself, as often as it likes."""
    model = network(1).eval()
    plan(model)
    inputs, losses = torch.randn(rows, WIDTH), list[float]()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps // 2):
        optimizer.step(closure)
    return losses, [model]


def lengths(plan: Plan, rows: int, steps: int) -> tuple[list[float], list[Any]]:
    """Batches of three lengths: each is planned when it first comes, and kept."""
    model = network(4)
    plan(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for i in range(2 * steps):
        length = rows // (1, 2, 4)[i % 3]
        loss = F.cross_entropy(model(torch.randn(length, WIDTH)), torch.arange(length) % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [model]


LOOPS = {function.__name__: function for function in (gan, scaler, lbfgs, lengths)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=sorted(LOOPS), default="gan")
    parser.add_argument("--budget", default="80%", help="as for checkpoint_model(): '4GiB', '80%%'")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args(arguments)

    def plan(model: nn.Module) -> nn.Module:
        return checkpoint_model(model, budget=options.budget)

    torch.manual_seed(0)
    losses, models = LOOPS[options.loop](plan, options.rows, options.steps)
    print("losses", " ".join(f"{loss:.4f}" for loss in losses))
    for model in models:
        print(model.planned.solution)
        print(model.planned.verification)


if __name__ == "__main__":
    main()
