"""Outputs of a graph under another name, so that it is seen which of them get a gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from profiler.tracing.fx_graphs.layouts import Layout


def noted(tensors: Sequence[Tensor], note: Callable[[dict[int, Layout | None]], None]) -> list[Tensor]:
    """The tensors under another name, so that it is seen which of them get a gradient from outside of their graph.

    They are no views: Dynamo would take them for other inputs of the next graph than planned ones.
    """
    on_tape = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    others: tuple[Tensor, ...] = ()
    if on_tape:
        others = _Noted.apply(
            lambda found: note({on_tape[k]: layout for k, layout in found.items()}), *(tensors[i] for i in on_tape)
        )  # type: ignore[no-untyped-call]
    renamed = dict(zip(on_tape, others, strict=True))
    return [renamed.get(i, tensor) for i, tensor in enumerate(tensors)]


class _Noted(torch.autograd.Function):
    """The identity, told which of its outputs get gradients."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[dict[int, Layout | None]], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.note = note
        ctx.layouts = [Layout.of(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found = {i: Layout.of(gradient) for i, gradient in enumerate(gradients) if gradient is not None}
        ctx.note({i: None if layout == ctx.layouts[i] else layout for i, layout in found.items()})
        return None, *gradients
