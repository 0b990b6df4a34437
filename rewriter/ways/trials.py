"""One forward and backward of a model as its caller does them, tried out for a proof."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.joint import Template, wanted, without_hooks
from profiler.tracing.ranks.torch_distributed import is_distributed
from rewriter.ways.rehearsal import Facts


def trial(call: Callable[[Any], Any], model: nn.Module, facts: Facts, batch: Any) -> list[Tensor | None]:
    """What `call(batch)` returns (of tensors that the caller lets go: digests), and all gradients behind it."""
    asked = wanted(model, batch)  # before the forward: one of shards leaves whole parameters in their place
    _, tensors = Template.of(call(batch))
    shown: list[Tensor | None] = [t if i in facts.held else digest(t) for i, t in enumerate(tensors)]
    layouts = [dict(facts.layouts).get(i) or Layout.of(tensors[i]) for i in sorted(facts.used)]
    loss = _Seed.apply(layouts, *(tensors[i] for i in sorted(facts.used)))  # type: ignore[no-untyped-call]
    del tensors
    with without_hooks(asked):
        if any(map(is_distributed, asked)):  # of which eager's forward uses other tensors: only `.grad` is theirs
            return shown + by_backward(loss, asked)
        return shown + list(torch.autograd.grad(loss, asked, allow_unused=True))


def by_backward(loss: Tensor, asked: Sequence[Any]) -> list[Tensor | None]:
    """What a backward adds to `.grad`; that is as before afterwards, and no hook on it runs."""
    before = [(tensor, tensor.grad, tensor._post_accumulate_grad_hooks) for tensor in asked]
    for tensor in asked:
        tensor.grad = tensor._post_accumulate_grad_hooks = None
    try:
        loss.backward()  # type: ignore[no-untyped-call]
        return [tensor.grad for tensor in asked]
    finally:
        for tensor, gradient, hooks in before:
            tensor.grad, tensor._post_accumulate_grad_hooks = gradient, hooks


class _Seed(torch.autograd.Function):
    """A loss that holds nothing of the outputs, and sends ones back to them."""

    @staticmethod
    def forward(ctx: Any, layouts: list[Layout], *outputs: Tensor) -> Tensor:
        pairs = [(o, layout.strides(tuple(o.shape))) for o, layout in zip(outputs, layouts, strict=True)]
        ctx.like = [(o.shape, stride, o.dtype, o.device) for o, stride in pairs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_ones(*like) for like in ctx.like)


def _ones(size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    empty = torch.empty_strided(size, stride, dtype=dtype, device=device)
    storage = torch.empty(0, dtype=dtype, device=device).set_(empty.untyped_storage())
    storage.fill_(1)  # one that repeats itself cannot be filled as it is
    return empty


WORD_BYTES = 8


def digest(tensor: Tensor) -> Tensor:
    """A number that differs where any bit does, all but surely; made in little memory."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % WORD_BYTES:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    whole = len(octets) // WORD_BYTES * WORD_BYTES
    words = octets[:whole].view(torch.int64)
    width = max(1, math.isqrt(words.numel()))
    rest = len(words) % width
    table = words[: len(words) - rest].view(-1, width)
    parts = (table.sum(0), table.sum(1), words[len(words) - rest :], octets[whole:].to(torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in parts:
        factors = (2 * torch.arange(len(part), dtype=torch.int64, device=tensor.device) + 1) * 0x9E3779B1
        total = total * 0x5851F42D + (part * factors).sum()
    return total
