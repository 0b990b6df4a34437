"""Ops sorted by what limits them: a cost model and a table of its errors need no finer grain."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from profiler.ops import argument, base_name, fresh, is_random, overload, tensors_of, written
from profiler.tracing.updates.optimizers import OpaqueStep


class OpKind(Enum):
    """What an op's time hangs on."""

    MATMUL = "matrix product"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution backward"
    DEPTHWISE = "depthwise convolution"
    DEPTHWISE_BACKWARD = "depthwise convolution backward"
    ATTENTION = "fused attention"
    ATTENTION_BACKWARD = "fused attention backward"
    NORM = "norm"
    NORM_BACKWARD = "norm backward"
    SOFTMAX = "softmax"
    ELEMENTWISE = "elementwise"
    TRANSCENDENTAL = "elementwise with exp, tanh or erf"
    REDUCTION = "reduction"
    POOLING = "pooling"
    RANDOM = "random"
    LOOKUP = "lookup"
    UPDATE = "optimizer update"
    OTHER = "other"


_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot"})
_TRANSCENDENTAL = frozenset(
    {
        "exp", "log", "tanh", "tanh_backward", "sigmoid", "gelu", "gelu_backward", "silu", "silu_backward", "erf",
        "pow", "mish", "mish_backward", "elu", "softplus", "softplus_backward", "sin", "cos", "log_sigmoid_forward",
    }
)  # fmt: skip
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "argmax", "var", "var_mean", "norm", "cumsum"})
# Of a table they read only the rows that they are asked for.
LOOKUPS = frozenset({"embedding", "index", "gather", "index_select", "take", "nll_loss_forward", "nll_loss2d_forward"})
_SCATTERS = frozenset({"embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add"})


def kind_of(node: fx.Node) -> OpKind:
    """The kind of an op that is not a view."""
    if isinstance(node.target, OpaqueStep):
        return OpKind.UPDATE
    op = overload(node)
    if op is None:
        return OpKind.OTHER
    name = base_name(op)
    if name in ("convolution", "convolution_backward"):
        return _convolution(node, backward=name == "convolution_backward")
    return _by_name(name.removesuffix("_") if not name.startswith("_") else name) or _by_nature(node, op)


def _convolution(node: fx.Node, *, backward: bool) -> OpKind:
    """Depthwise is a convolution in as many groups as channels: its kernels are others, and far from the peak."""
    weight = next((t for n in _named(node, "weight") for t in tensors_of(n)), None)
    depthwise = isinstance(weight, Tensor) and argument(node, "groups") > 1 and weight.shape[1] == 1
    if depthwise:
        return OpKind.DEPTHWISE_BACKWARD if backward else OpKind.DEPTHWISE
    return OpKind.CONVOLUTION_BACKWARD if backward else OpKind.CONVOLUTION


def _named(node: fx.Node, name: str) -> tuple[fx.Node, ...]:
    found = argument(node, name)
    return (found,) if isinstance(found, fx.Node) else ()


def _by_name(name: str) -> OpKind | None:
    backward = "backward" in name
    if name in _MATMULS:
        return OpKind.MATMUL
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return OpKind.ATTENTION_BACKWARD if backward else OpKind.ATTENTION
    if "batch_norm" in name or "layer_norm" in name or "group_norm" in name or "rms_norm" in name:
        return OpKind.NORM_BACKWARD if backward else OpKind.NORM
    if "softmax" in name:
        return OpKind.SOFTMAX
    if "pool" in name:
        return OpKind.POOLING
    if name.startswith(("_fused_ad", "_fused_sgd", "_foreach")):
        return OpKind.UPDATE
    if name in LOOKUPS or name in _SCATTERS:
        return OpKind.LOOKUP
    if name in _TRANSCENDENTAL:
        return OpKind.TRANSCENDENTAL
    return OpKind.REDUCTION if name in _REDUCTIONS else None


def _by_nature(node: fx.Node, op: OpOverload) -> OpKind:
    if is_random(node):
        return OpKind.RANDOM
    copies = base_name(op) in ("clone", "copy_", "_to_copy", "fill_", "zero_") or node.target is fresh
    return OpKind.ELEMENTWISE if torch.Tag.pointwise in op.tags or copies or written(node) else OpKind.OTHER
