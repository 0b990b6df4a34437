"""Tensors that are neither the model's nor the optimizer's nor the batch's: they get stand-ins when first seen.

A captured graph reads and writes the live tensor itself, as a constant of the graph; while it is traced nothing of it
is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes

from profiler.errors import CaptureError
from profiler.ops import memory_of
from profiler.tracing.ranks.torch_distributed import local


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A tensor from outside, what stands for it, what that was like at first, and where the step used it."""

    live: Tensor
    stand_in: Tensor
    memory: int
    gradient: Tensor | None
    line: str

    @property
    def what(self) -> str:
        return f"a tensor of shape {tuple(self.live.shape)} that is not the model's ({self.line})"


class OutsideTensors:
    """The stand-ins of one trace, by the tensor that they stand for."""

    def __init__(self, mode: FakeTensorMode, tracer: Any, place: Callable[[], str]) -> None:
        self._mode = mode
        self._tracer = tracer
        self._place = place
        self._seen: dict[int, _Seen] = {}

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor from outside: always the same, in memory shared as the tensors' own is."""
        found = self._seen.get(id(tensor))
        if found is None:
            found = self._seen[id(tensor)] = self._new(tensor)
        return found.stand_in

    @property
    def live(self) -> tuple[Tensor, ...]:
        """The tensors that the step used."""
        return tuple(seen.live for seen in self._seen.values())

    def _new(self, tensor: Tensor) -> _Seen:
        if tensor.grad_fn is not None and torch.is_grad_enabled():
            raise CaptureError(
                f"the step goes on with a tensor of shape {tuple(tensor.shape)} that an earlier computation made, "
                "gradients and all: use tensor.detach(), or compute it inside the step"
            )
        with _disable_current_modes():  # the stand-in of a view is made by ops, which are none of the step's
            stand_in = self._mode.from_tensor(tensor)
        name = self._tracer.get_fresh_qualname("_outside_tensor")
        setattr(self._tracer.root, name, tensor)
        proxy = self._tracer.create_proxy("get_attr", name, (), {})
        track_tensor_tree(stand_in, proxy, constant=None, tracer=self._tracer)
        gradient = None if tensor.grad is None else self.stand_in(tensor.grad)
        stand_in.grad = gradient
        memory = memory_of(stand_in)._cdata
        return _Seen(live=tensor, stand_in=stand_in, memory=memory, gradient=gradient, line=self._place())

    def check(self) -> None:
        """CaptureError where the step did more to one of them than write to its memory."""
        for seen in self._seen.values():
            if seen.stand_in.grad is not seen.gradient:
                raise CaptureError(
                    f"the step differentiates {seen.what}: make it part of the model, or use it under torch.no_grad()"
                )
            if memory_of(seen.stand_in)._cdata != seen.memory:
                raise CaptureError(f"the step gives other memory to {seen.what} (`.data =`): write in place")
            if seen.stand_in.requires_grad != seen.live.requires_grad:
                raise CaptureError(f"the step changes requires_grad of {seen.what}: do so outside of it")


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has memory, and is no stand-in, nor what `torch.func` wraps around one."""
    return not isinstance(local(tensor), FakeTensor) and not is_functorch_wrapped_tensor(tensor)
