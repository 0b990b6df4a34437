"""What a GPU would run instead of what the CPU does, as far as that can be known without one.

The step is traced on the CPU's fake tensors. While it is, calls of dropout, attention and (under autocast) of the
norms are answered with the ops that CUDA would choose, whose backward is then CUDA's too. A step captured so is for
planning only. Rules and op lists are those of torch's own dispatch: `native_dropout` wherever 0 < p < 1; flash
attention for half precision without a mask from compute capability 8.0 on, memory-efficient attention otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn import functional as F  # noqa: N812 - the field's own name for it
from torch.utils import _pytree as pytree

from planner.ir import Graph, Rerun
from profiler.ops import UNORDERED_ON_CUDA, memory_of
from profiler.tracing.eager_ways.meant_calls import MeantCalls
from profiler.tracing.fake_tensors.patches import patched

aten = torch.ops.aten

PHILOX_STATE_BYTES = 16  # the seed and offset of a CUDA generator

# As they are when nothing is replaced.
_dropout, _attention = F.dropout, F.scaled_dot_product_attention

# Heads wider than this, or not a multiple of 8, have no fused kernel or a padded one.
WIDEST_FUSED_HEAD = 256

# CUDA's autocast runs these in float32, and the CPU's does not.
_FLOAT32_ON_CUDA = (
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax,
    F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.pow,
    Tensor.pow, Tensor.__pow__, torch.rsqrt, Tensor.rsqrt, torch.logsumexp, Tensor.logsumexp, F.softplus, torch.sum,
    Tensor.sum,
)  # fmt: skip


class Change(Enum):
    """What a call was replaced by."""

    DROPOUT = "dropout as native_dropout, with a mask of one byte an element"
    FLASH = "attention as flash attention, without its scores"
    EFFICIENT = "attention as memory-efficient attention, without its scores"
    FLOAT32 = "norms, softmax, exp, log, pow and sums in float32 under autocast, as CUDA's op lists have it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One kind of replacement made in a captured step, and the bytes kept for the backward before and after it."""

    change: Change
    count: int
    cpu_bytes: int
    gpu_bytes: int

    def __str__(self) -> str:
        return f"{self.count}x {self.change.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The GPU to capture for. `has_bfloat16`: compute capability 8.0 or newer, where flash attention runs."""

    name: str
    has_bfloat16: bool


class GpuKernels(MeantCalls):
    """While active, calls take the form that the target runs; `substitutions` and `unknown` tell what was done."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self._changes: dict[Change, list[tuple[int, int]]] = {}
        self._unknown: Counter[str] = Counter()
        self._kept: dict[tuple[Any, ...], int] = {}  # bytes a call keeps for its backward, by its signature

    def __enter__(self) -> GpuKernels:
        self._changes.clear()  # a step may be traced more than once
        self._unknown.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def substitutions(self) -> tuple[Substitution, ...]:
        return tuple(
            Substitution(
                change=change, count=len(kept), cpu_bytes=sum(cpu for cpu, _ in kept), gpu_bytes=sum(g for _, g in kept)
            )
            for change, kept in self._changes.items()
        )

    @property
    def unknown(self) -> tuple[str, ...]:
        """What stayed in the CPU's form although the GPU's may differ."""
        return tuple(f"{count}x {what}" for what, count in self._unknown.items())

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call in the form that the target runs."""
        if func in (_dropout, torch.dropout):
            names = {"input": "x", "train": "training"}  # either function's own
            return self._dropout(func, *args, **{names.get(name, name): value for name, value in kwargs.items()})
        if func is _attention:
            return self._attention(func, *args, **kwargs)
        if func in _FLOAT32_ON_CUDA and torch.is_autocast_enabled("cpu"):
            return self._in_float32(func, args, kwargs)
        if func in (F.batch_norm, torch.batch_norm):
            self._unknown["batch norm: cuDNN's reserve space is not counted"] += 1
        if func is F.multi_head_attention_forward:
            with self._inside_attention():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def _inside_attention(self) -> Iterator[None]:
        """torch's own multi-head attention calls further functions with this mode off: it finds ours by their names."""

        def ours(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.call(function, args, kwargs)

        names = ("dropout", "softmax", "scaled_dot_product_attention")
        with patched([(F, name, ours(getattr(F, name))) for name in names]):
            yield

    # -- dropout ------------------------------------------------------------------------------------------------

    def _dropout(
        self, func: Callable[..., Any], x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or not 0 < p < 1 or x.numel() == 0:
            return func(x, p, training)
        if inplace:
            self._unknown["dropout in place: has the CPU's form"] += 1
            return func(x, p, training, inplace)
        self._note(
            Change.DROPOUT, [x], cpu=lambda y: torch.dropout(y, p, True), gpu=lambda y: aten.native_dropout(y, p, True)
        )
        return aten.native_dropout(x, p, True)[0]

    # -- attention ----------------------------------------------------------------------------------------------

    def _attention(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        query, key, value = (_autocast(t) for t in (query, key, value))
        inputs = [query, key, value]

        def cpu(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return func(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if why := _why_not_fused(query, key, value, attn_mask, enable_gqa):
            self._unknown[f"attention {why}: has the CPU's form"] += 1
            return cpu(*inputs)
        if attn_mask is None and self.target.has_bfloat16 and query.dtype in (torch.float16, torch.bfloat16):
            change = Change.FLASH

            def gpu(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)
        else:
            change, bias = Change.EFFICIENT, _bias(attn_mask, query, key)

            def gpu(q: Tensor, k: Tensor, v: Tensor) -> Any:
                return aten._scaled_dot_product_efficient_attention(
                    q, k, v, bias, True, dropout_p, is_causal, scale=scale
                )

        self._note(change, inputs, cpu=cpu, gpu=gpu, also=(dropout_p, is_causal, attn_mask is None))
        return gpu(*inputs)[0]

    # -- autocast -----------------------------------------------------------------------------------------------

    def _in_float32(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        low = [t for t in pytree.tree_leaves((args, kwargs)) if _is_low(t)]
        if not low:
            return func(*args, **kwargs)
        self._changes.setdefault(Change.FLOAT32, []).append((_bytes(low), 2 * _bytes(low)))
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.float() if _is_low(t) else t, (args, kwargs))
        return func(*args, **kwargs)

    # -- what it changes ----------------------------------------------------------------------------------------

    def _note(
        self,
        change: Change,
        inputs: list[Tensor],
        *,
        cpu: Callable[..., Any],
        gpu: Callable[..., Any],
        also: tuple[Any, ...] = (),
    ) -> None:
        signature = (change, also, *((tuple(t.shape), t.dtype, t.stride()) for t in inputs))
        kept = tuple(self._kept_bytes((*signature, name), run, inputs) for name, run in (("cpu", cpu), ("gpu", gpu)))
        self._changes.setdefault(change, []).append((kept[0], kept[1]))

    def _kept_bytes(self, signature: tuple[Any, ...], run: Callable[..., Any], inputs: list[Tensor]) -> int:
        if signature not in self._kept:
            with disable_proxy_modes_tracing():
                self._kept[signature] = kept_for_backward(run, inputs)
        return self._kept[signature]


def kept_for_backward(run: Callable[..., Any], inputs: Iterable[Tensor]) -> int:
    """Bytes that autograd holds after `run` beside its inputs and its (first) result."""
    leaves = [torch.empty_like(t).requires_grad_() for t in inputs]
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = memory_of(tensor)
        held[memory._cdata] = memory.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = run(*leaves)
    result = out if isinstance(out, Tensor) else out[0]
    for own in (*leaves, result):
        held.pop(memory_of(own)._cdata, None)
    return sum(held.values())


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _autocast(tensor: Tensor) -> Tensor:
    if not torch.is_autocast_enabled("cpu") or tensor.dtype != torch.float32:
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _why_not_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool) -> str:
    """Why torch would take no fused kernel, or "": then flash or memory-efficient attention."""
    head = query.shape[-1]
    if query.dim() != 4:
        return f"of {query.dim()} dimensions"
    if head % 8 or head > WIDEST_FUSED_HEAD or value.shape[-1] != head:
        return f"with heads of {head} and {value.shape[-1]} elements"
    if gqa or key.shape[1] != query.shape[1]:
        return "with grouped heads"
    if mask is not None and mask.requires_grad:
        return "with a trained mask"
    return ""


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: numbers to be added, seen by every head."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    else:
        mask = mask.to(query.dtype)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def as_on_gpu(graph: Graph) -> Graph:
    """The graph with a CUDA generator's state, and without reruns of ops that add in no fixed order there."""
    states = {op.rng_state for op in graph.ops if op.rng_state is not None}
    storages = (replace(s, nbytes=PHILOX_STATE_BYTES) if s.id in states else s for s in graph.storages)
    ops = (
        replace(op, rerun=Rerun.NEVER, never_reason="adds in no fixed order on a GPU")
        if op.rerun is Rerun.FREELY and _base(op.target) in UNORDERED_ON_CUDA
        else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops), storages=tuple(storages)).validate()


def _base(target: str) -> str:
    pieces = target.split(".")
    return pieces[1] if len(pieces) > 1 else target
