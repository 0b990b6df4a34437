"""How a gradient lies in memory, as far as that is the same at other sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order of a tensor's dimensions in memory, the outermost first, and those along which it repeats itself.

    `gaps` are the shape and strides of a tensor that leaves some of its memory out: these hold for that shape only.
    """

    order: tuple[int, ...]
    repeated: frozenset[int] = frozenset()
    gaps: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        """The layout of a tensor; dimensions of size 1 lie wherever a dense tensor would have them."""
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        repeated = frozenset(d for d, stride in enumerate(strides) if stride == 0 and shape[d] > 1)
        wide = [d for d in range(len(shape)) if shape[d] > 1 and d not in repeated]
        by_stride = iter(sorted(wide, key=lambda d: -strides[d]))
        order = tuple(next(by_stride) if d in set(wide) else d for d in range(len(shape)))
        dense = Layout(order=order, repeated=repeated)
        return dense if dense.fits(tensor) else Layout(order=order, repeated=repeated, gaps=(shape, strides))

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The strides of a tensor of this shape."""
        if self.gaps is not None and self.gaps[0] == shape:
            return self.gaps[1]
        strides, step = [0] * len(shape), 1
        for d in reversed(self.order):
            if d not in self.repeated:
                strides[d], step = step, step * max(1, shape[d])
        return tuple(strides)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor lies so."""
        own = self.strides(tuple(tensor.shape))
        return all(a == b for a, b, n in zip(own, tensor.stride(), tensor.shape, strict=True) if n > 1)

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of another's shape and type that lies so; what is in it is not said."""
        shape = tuple(like.shape)
        return torch.empty_strided(shape, self.strides(shape), dtype=like.dtype, device=like.device)


def laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """The same values, lying so; a copy where they do not yet."""
    if layout.fits(tensor):
        return tensor
    if layout.repeated:  # written into, a tensor that repeats itself would say less
        return tensor
    return layout.empty(tensor).copy_(tensor)
