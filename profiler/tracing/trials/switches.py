"""Torch's own switches: a step that turns one is refused, since its graph runs under those around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import Patch, patched

# What turns a switch; what tells how it stands, and what sets it to that.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "set_default_tensor_type": (torch.get_default_dtype, torch.set_default_dtype),
    "set_float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "use_deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "set_num_threads": (torch.get_num_threads, torch.set_num_threads),
}


@contextmanager
def refusing_switches() -> Iterator[None]:
    """Inside, who turns a switch of torch's is refused, and it is turned back; to what it is already, it may be set."""
    patches: list[Patch] = [(torch, name, _refusing(name, getattr(torch, name))) for name in _SWITCHES]
    with patched(patches):
        yield


def _refusing(name: str, turn: Callable[..., None]) -> Callable[..., None]:
    get, turn_back = _SWITCHES[name]

    def call(*args: Any, **kwargs: Any) -> None:
        before = get()
        turn(*args, **kwargs)
        if get() == before:
            return
        turn_back(before)
        raise CaptureError(
            f"the step calls torch.{name}, under which its graph would not run: call it before the step, or give what "
            "needs it (a dtype) where it is needed"
        )

    return call
