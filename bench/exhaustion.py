"""Running out of memory, told apart from every other failure and turned into an error that names the way on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from planner.errors import PlannerError

T = TypeVar("T")

# How the CPU's allocator says it; it raises a plain RuntimeError.
_CPU_WORDS = ("can't allocate memory", "not enough memory")


class OutOfMemory(PlannerError):  # noqa: N818 - an answer, not a fault
    """The machine's memory was not enough for a step."""


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


def guarded(what: str, call: Callable[[], T]) -> T:
    """`call()`; OutOfMemory that says during `what` if memory runs out, with everything it held let go."""
    said = ""
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # Outside of the handler, where the error no longer holds the frames and their tensors.
    gc.collect()
    raise OutOfMemory(f"out of memory while {what}: {said}")
