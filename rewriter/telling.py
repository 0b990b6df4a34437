"""Warnings that stand at the user's own line, however deep below it they come from."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from profiler.errors import is_machinery

_HERE = str(Path(__file__).parent) + os.sep


def warn_caller(text: str) -> None:
    """A UserWarning at the line that led here, the first one outside of torch and of this project."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (is_machinery(frame.f_code.co_filename) or _is_ours(frame.f_code.co_filename)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, UserWarning, stacklevel=level)


def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE)
