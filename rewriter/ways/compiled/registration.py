"""The name under which torch.compile finds the backend: an entry point where the project is installed, else this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any

NAME = "recompute"
GROUP = "torch_dynamo_backends"


def recompute(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
    """The backend, loaded when torch.compile first asks for it."""
    from rewriter.ways.compiled import backend

    return backend.recompute(module, inputs, **options)


@cache
def register() -> None:
    """Let `torch.compile(model, backend="recompute")` find it, whether or not the project is installed."""
    if any(entry.name == NAME for entry in entry_points(group=GROUP)):
        return  # torch looks there by itself, and need not be loaded for it now
    from torch._dynamo import register_backend

    register_backend(recompute, name=NAME)
