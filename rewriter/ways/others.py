"""Tensors beside a planned model: a budget in bytes is theirs too, and they may grow after it was planned."""

from __future__ import annotations

from collections.abc import Callable

import torch

from profiler.measuring.memory import allocation_mark
from rewriter.ways.company import open_bytes


class Others:
    """What other tensors take, counted anew only where more is allocated than when they were counted last.

    A count goes through every object that Python knows; the mark is read in microseconds, and grows at least by as
    much as they do.
    """

    def __init__(self) -> None:
        self._mark: int | None = None
        self._nbytes = 0

    def exceed(self, most_bytes: int, device: torch.device, count: Callable[[], int]) -> bool:
        """Whether they take more than so much now."""
        mark = allocation_mark(device)
        mark = None if mark is None else mark - open_bytes()  # other forwards are counted by themselves
        if mark is not None and self._mark is not None:
            self._mark = min(self._mark, mark)  # what is no tensor may have gone, and must not hide that others grow
            if self._nbytes + mark - self._mark <= most_bytes:
                return False
        self._nbytes, self._mark = count(), mark
        return self._nbytes > most_bytes
