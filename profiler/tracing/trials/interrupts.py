"""Ctrl-C while the user's objects are changed for a trial: it comes through, at the next moment that can take it.

Two kinds of moments cannot. While something is put in its place, or put back, it has to come to its end. And between
C++ of torch's and Python that it calls, in a mode or in the tables of its operators, what is raised can end the whole
process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# Inside functions of these names something is put in place, or put back.
_UNDIVIDED = frozenset({"__enter__", "__exit__", "enter_context", "put_back"})
_BELOW_C = frozenset({"__torch_function__", "__torch_dispatch__"})
_TORCH = str(Path(torch.__file__).parent) + os.sep
# What of torch's is called by Python, or by those parts of its C++ that hand on what is raised.
_CALLED_BY_PYTHON = tuple(_TORCH + part for part in ("nn", "optim", "autograd", "fx", "utils", "_tensor.py"))
_PROFILER = str(Path(__file__).parents[2]) + os.sep


@contextmanager
def interrupts_come_between() -> Iterator[None]:
    """Inside, an interrupt waits for a moment that can take it, or for the end."""
    before = signal.getsignal(signal.SIGINT)
    of_others = threading.current_thread() is not threading.main_thread() or not callable(before)
    if of_others or isinstance(before, _HoldingBack):
        yield
        return
    holding = _HoldingBack(before)
    signal.signal(signal.SIGINT, holding)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        holding.end()


class _HoldingBack:
    """A handler that has an interrupt wait, and hands it to the one before."""

    def __init__(self, before: Any) -> None:
        self._before = before
        self._waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if _can_take_it(frame):
            return self._before(number, frame)
        self._waiting = True
        if sys.getprofile() is None:  # else it waits for the end: who measures has the only place there is
            sys.setprofile(self._watch)
        return None

    def _watch(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._waiting and _can_take_it(frame):
            self._stop()
            self._before(signal.SIGINT, frame)

    def end(self) -> None:
        """Hand over what has waited until now."""
        if self._waiting:
            self._stop()
            self._before(signal.SIGINT, sys._getframe())

    def _stop(self) -> None:
        self._waiting = False
        if sys.getprofile() == self._watch:
            sys.setprofile(None)


def _can_take_it(frame: FrameType | None) -> bool:
    innermost = ""
    while frame is not None:
        if frame.f_code.co_name in _UNDIVIDED or frame.f_code.co_name in _BELOW_C:
            return False
        file = frame.f_code.co_filename
        innermost = innermost or ("" if file.startswith(_PROFILER) else file)
        frame = frame.f_back
    return not innermost.startswith(_TORCH) or innermost.startswith(_CALLED_BY_PYTHON)
