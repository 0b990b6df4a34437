"""Running out of memory, told apart from every other failure and turned into an error that names the way on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

from planner.errors import PlannerError
from profiler.measuring.memory import is_exhaustion

T = TypeVar("T")


class OutOfMemory(PlannerError):  # noqa: N818 - an answer, not a fault
    """The machine's memory was not enough for a step, or would not be."""


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
