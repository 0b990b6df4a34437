"""Silence for native libraries that print whatever their options say.

HiGHS has bare `printf`s. Pointing the file descriptor elsewhere would also swallow what other threads of the
program print meanwhile; Python writes past C's `stdout`, so it is enough to swap that pointer, which glibc lets us do.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


class _Stdout:
    """C's `stdout`, and how many calls want it silent now."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None)
        self.libc.fopen.restype = ctypes.c_void_p
        self.pointer = ctypes.c_void_p.in_dll(self.libc, "stdout")
        self.loud = self.pointer.value
        self.silent = self.libc.fopen(os.devnull.encode(), b"w")
        self.lock = threading.Lock()
        self.wanting = 0

    def count(self, change: int) -> None:
        with self.lock:
            self.wanting += change
            self.pointer.value = self.silent if self.wanting else self.loud


@cache
def _stdout() -> _Stdout | None:
    """None where C's `stdout` may not be assigned to."""
    return _Stdout() if platform.libc_ver()[0] == "glibc" else None


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """What C code prints inside goes nowhere; what Python prints is shown as ever."""
    stdout = _stdout()
    if stdout is None:
        yield
        return
    stdout.count(1)
    try:
        yield
    finally:
        stdout.count(-1)
