"""Fake tensors that lie in memory as eager's would.

Torch's fakes of ops such as `softplus_backward` are made by other ops than the op itself runs, and where its inputs lie
differently in memory, so does what comes out: a `reshape` is then traced as a view that no real tensor allows, or sums
go through memory in another order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from profiler.tracing.fx_graphs.layouts import Layout

aten = torch.ops.aten

# Elementwise too, and not tagged so by torch.
_ELEMENTWISE = frozenset(
    {
        aten.binary_cross_entropy_backward.default, aten.elu_backward.default, aten.hardsigmoid_backward.default,
        aten.hardswish_backward.default, aten.hardtanh_backward.default, aten.huber_loss_backward.default,
        aten.leaky_relu_backward.default, aten.log_sigmoid_backward.default, aten.mse_loss_backward.default,
        aten.native_dropout_backward.default, aten.rrelu_with_noise_backward.default,
        aten.smooth_l1_loss_backward.default, aten.soft_margin_loss_backward.default, aten.softplus_backward.default,
    }
)  # fmt: skip
_layouts: dict[Hashable, Layout | None] = {}  # by the op and how its inputs lie: how what it makes lies


class EagerLayouts(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode whose elementwise ops answer with tensors that lie as eager's do."""

    def dispatch(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] = {},
    ) -> object:
        """What torch's own mode answers, moved to where eager would have it."""
        made = super().dispatch(func, types, args, kwargs)
        if not isinstance(made, FakeTensor) or made.dim() < 2 or not _is_elementwise(func):
            return made
        layout = _layout_in_eager(func, args, kwargs)
        if layout is None or layout.fits(made):
            return made
        shape = tuple(made.shape)
        where: dict[str, Any] = {"dtype": made.dtype, "device": made.device}
        return super().dispatch(aten.empty_strided.default, types, (shape, layout.strides(shape)), where)


def _is_elementwise(func: OpOverload) -> bool:
    if func._schema.is_mutable or any(returned.alias_info for returned in func._schema.returns):
        return False
    return torch.Tag.pointwise in func.tags or func in _ELEMENTWISE


def _layout_in_eager(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> Layout | None:
    """How the result lies, found by the op itself on tensors of a few numbers; None where that tells nothing.

    Asked only where an input is not laid out row by row: torch's fakes are right about those that are.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(not isinstance(n, int) for tensor in tensors for n in tensor.shape):
        return None  # a size that is a symbol
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    key = (func, tuple(_seen(tensor) for tensor in tensors))
    if key not in _layouts:
        _layouts[key] = _tried(func, leaves, tree)
    return _layouts[key]


def _seen(tensor: Tensor) -> Hashable:
    layout = Layout.of(tensor)
    return tensor.dtype, tuple(min(n, 2) for n in tensor.shape), layout.order, layout.repeated


def _tried(func: OpOverload, leaves: Iterable[Any], tree: Any) -> Layout | None:
    with _disable_current_modes(), torch.no_grad():
        small = [_small(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(small, tree)
        try:
            return Layout.of(func(*args, **kwargs))
        except (RuntimeError, NotImplementedError):  # it takes no such values, or no such types on a CPU
            return None


def _small(tensor: Tensor) -> Tensor:
    """Ones that lie as a tensor does, two of them along each of its dimensions."""
    layout, shape = Layout.of(tensor), [min(n, 2) for n in tensor.shape]
    own = tuple(1 if d in layout.repeated else n for d, n in enumerate(shape))
    strides = Layout(order=layout.order).strides(own)
    return torch.empty_strided(own, strides, dtype=tensor.dtype).fill_(1).expand(shape)
