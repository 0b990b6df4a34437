"""What capturing and profiling raise on purpose."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from planner.errors import PlannerError

# Frames of these directories are machinery: a person looks for the line of their own above them.
_MACHINERY = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(traceback.__file__).parent / "contextlib.py"),
)


# The way out for code that is no graph but surrounds one.
MODEL_DOOR = (
    "checkpoint_model(part, budget=...) plans a model, or a part of one, and leaves everything around it as it is"
)


_LIBRARIES = sysconfig.get_path("purelib")


class CaptureError(PlannerError):
    """A step that cannot be captured, or no longer is the one that was: the message says where and what to do."""


def is_machinery(filename: str) -> bool:
    """Whether a source file belongs to torch or to the profiler, not to the user or a model library."""
    return filename.startswith(_MACHINERY) or filename.startswith("<")


def _place(frame: traceback.FrameSummary) -> str:
    """`path/file.py:12: code`, relative to the working directory where it lies below it."""
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}: {frame.line}"


def _places(error: BaseException) -> str:
    """The user's own line, and below it the line of the library that it led to."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_machinery(f.filename)]
    own = [f for f in frames if not f.filename.startswith(sysconfig.get_path("purelib"))] or frames
    if not own:
        return "the train step"
    inside = "" if frames[-1] is own[-1] else f"\n  inside {_place(frames[-1])}"
    return _place(own[-1]) + inside


def explain(error: Exception, *, why: str = "") -> str:
    """Where tracing stopped, why (unless the caller knows better), and what to do about it."""
    return f"{_places(error)}\n  {why or _cause(error)}{_in_a_library(error)}"


def _in_a_library(error: Exception) -> str:
    """What helps where the line that cannot be captured is not the user's to change."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_machinery(f.filename)]
    if not frames or isinstance(error, CaptureError) or not frames[-1].filename.startswith(_LIBRARIES):
        return ""
    return f". That line is a library's: look for a setting that avoids it, or plan around it. {MODEL_DOOR}"


def _cause(error: Exception) -> str:
    if isinstance(error, CaptureError):
        return str(error)
    if isinstance(error, DataDependentOutputException):
        return (
            "the step reads a tensor's value while it runs (.item(), float(), bool(), `if tensor:`), so that what "
            "it does depends on data: return the tensor and read it after the step, or use torch.where"
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"{error.args[0] if error.args else 'an op'} makes a tensor whose shape depends on data (as indexing by a "
            "boolean mask, nonzero, packed sequences and CTC do), which one graph of fixed sizes cannot hold: keep "
            f"that part outside of what is planned. {MODEL_DOOR}"
        )
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], torch.Tensor):
        return (
            "something is looked up by a tensor itself, in a dict whose keys are parameters (optimizers that step in "
            "gradient hooks have one), and stand-ins take the place of tensors here: use their names for keys, or plan "
            "the model alone with checkpoint_model(model, budget=...), which leaves hooks and optimizers as they are"
        )
    if isinstance(error, NotImplementedError) and "HigherOrderOperator" in str(error):
        return (
            "the step uses control flow as an operator (torch.cond, while_loop, scan), which is not captured: an `if` "
            f"on the value is followed as it goes, and torch.where takes both ways; or keep it outside. {MODEL_DOOR}"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return f"tracing failed here with {type(error).__name__}: {first}"
