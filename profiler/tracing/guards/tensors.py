"""Tensors as a graph reads them: shape, strides, type, device, whether they are differentiated, and their hooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Slot(Protocol):
    """A place that a live tensor is read from; `find` gives None where it is gone, `tensor` raises."""

    @property
    def name(self) -> str: ...

    def find(self) -> Tensor | None: ...

    def tensor(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """What the graph assumes of an input tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # () where the layout has none
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The specification that `tensor` meets."""
        return TensorSpec(
            shape=tuple(tensor.shape),
            stride=tensor.stride() if tensor.layout == torch.strided else (),
            dtype=tensor.dtype,
            device=tensor.device,
            layout=tensor.layout,
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` meets this specification."""
        return (
            tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and tensor.device == self.device
            and tensor.layout == self.layout
            and (self.layout != torch.strided or tensor.stride() == self.stride)
        )

    def __str__(self) -> str:
        order = f"stride {list(self.stride)}" if self.layout == torch.strided else str(self.layout)
        return f"{self.dtype}{list(self.shape)} {order} on {self.device}"


def hooks_of(tensor: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What runs on a tensor's gradient, and what runs once it is accumulated."""
    before, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return tuple(before.values()) if before else (), tuple(after.values()) if after else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The slot of a tensor that the graph holds itself: who holds it beside the graph is looked after elsewhere."""

    name: str
    held: Tensor

    def find(self) -> Tensor | None:
        return self.held

    def tensor(self) -> Tensor:
        return self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGuard:
    """A parameter or buffer as the graph reads it."""

    slot: Slot
    spec: TensorSpec
    requires_grad: bool
    hooks: tuple[tuple[Any, ...], tuple[Any, ...]]

    @staticmethod
    def of(slot: Slot, tensor: Tensor) -> TensorGuard:
        """The guard that `tensor`, which lies in `slot`, meets."""
        return TensorGuard(
            slot=slot, spec=TensorSpec.of(tensor), requires_grad=tensor.requires_grad, hooks=hooks_of(tensor)
        )

    def holds(self) -> bool:
        now = self.slot.find()
        return (
            now is not None
            and self.spec.fits(now)
            and now.requires_grad == self.requires_grad
            and hooks_of(now) == self.hooks
        )

    def mismatches(self) -> Iterator[str]:
        """What differs; nothing where the tensor is gone, which the guard of its module says."""
        name, now = self.slot.name, self.slot.find()
        if now is None:
            return
        if not self.spec.fits(now):
            yield f"{name} was {self.spec} and is {TensorSpec.of(now)}"
        if now.requires_grad != self.requires_grad:
            yield f"{name}.requires_grad was {self.requires_grad} and is {now.requires_grad}"
        if hooks_of(now) != self.hooks:
            yield f"the gradient hooks of {name} are not those of the captured step"
