"""Torch functions that somebody has put another in the place of: what was called is what is traced.

Where a mode is on, torch hands over its functions as it finds them under their names. A replacement that calls the
function which it replaced would be handed over for that call, too, and so be applied a second time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.overrides import TorchFunctionMode, handle_torch_function

from profiler.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent) + os.sep


class MeantCalls(TorchFunctionMode):
    """A mode whose `call` gets the very functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self._behind: dict[CodeType, FunctionType] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_torchs_own(func):
            func = self._meant(func, sys._getframe(1))
        return self.call(func, args, kwargs or {})

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What becomes of a call."""
        raise NotImplementedError

    def _meant(self, func: Callable[..., Any], caller: FrameType) -> Callable[..., Any]:
        if caller.f_code is handle_torch_function.__code__ and caller.f_back is not None:
            return self._running(caller.f_back)
        name = next((name for name, member in vars(Tensor).items() if member is func), None)
        if name is not None and hasattr(TensorBase, name):
            return getattr(TensorBase, name)  # type: ignore[no-any-return]
        _refuse_replaced_kernel(func)
        return func

    def _running(self, frame: FrameType) -> Callable[..., Any]:
        """The function of torch's that is running and asks the mode; it hands over all of its arguments."""
        code = frame.f_code
        if code not in self._behind:
            cells = tuple(CellType(frame.f_locals[name]) for name in code.co_freevars)
            self._behind[code] = FunctionType(code, frame.f_globals, code.co_name, None, cells)
        return self._behind[code]


def _is_torchs_own(func: Any) -> bool:
    code = getattr(func, "__code__", None)
    if code is None:  # one of torch's kernels, or an object that stands in the place of a function
        return not hasattr(func, "__dict__") or type(func).__module__.startswith("torch.")
    return code.co_filename.startswith(_TORCH) and not hasattr(func, "__wrapped__")


def _refuse_replaced_kernel(func: Callable[..., Any]) -> None:
    name = next((name for name, member in vars(torch._C._nn).items() if member is func), None)
    if name is not None:
        raise CaptureError(
            f"the kernel {name} was replaced inside of torch, in torch._C._nn, where a trace would apply the "
            f"replacement twice: replace torch.nn.functional.{name} instead"
        )
