"""Ctrl-C while the user's objects are changed for a trial: it comes through, but not in the middle of putting back."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Inside functions of these names something is put in place, or put back: either has to come to its end.
_UNDIVIDED = frozenset({"__enter__", "__exit__", "enter_context", "put_back"})
_AGAIN_S = 0.02


@contextmanager
def interrupts_come_between() -> Iterator[None]:
    """Inside, an interrupt waits until whatever is being put in its place, or back, is there."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handle(number: int, frame: FrameType | None) -> Any:
        if not _is_undivided(frame):
            return before(number, frame)
        again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        again.daemon = True
        return again.start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_undivided(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _UNDIVIDED:
            return True
        frame = frame.f_back
    return False
