"""Values that never change in place, their exact equality, and how a sentence shows them."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import struct
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# What a step may take, return and read as it is: it never changes in place.
PLAIN = (int, float, bool, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size)

_ALSO_PLAIN = (
    type(...),
    type(NotImplemented),
    range,
    slice,
    np.generic,
    np.dtype,
    torch.layout,
    torch.memory_format,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
)

_LONGEST = 60  # letters of a value in a sentence


class Unset:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        return "not set"


UNSET = Unset()


class Gone:
    """Stands for a value that is only told of: a tensor of a trace, which must not outlive it."""

    def __init__(self, value: Any) -> None:
        self._text = shown(value)

    def __repr__(self) -> str:
        return self._text


def is_plain(value: Any) -> bool:
    """Whether a value never changes in place: a number, a text, None and the like, or a tuple of these."""
    if isinstance(value, (*PLAIN, *_ALSO_PLAIN)):
        return True
    return isinstance(value, (tuple, frozenset)) and not hasattr(value, "__dict__") and all(map(is_plain, value))


def exactly_equal(a: Any, b: Any) -> bool:
    """Whether two plain values are the same to the bit: 0.0 is not -0.0, 1 is not True, and NaN is itself."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex)):
        return bool(_bits(a) == _bits(b))
    if isinstance(a, np.generic):
        return bool(a.dtype == b.dtype and a.tobytes() == b.tobytes())
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(exactly_equal, a, b))
    if isinstance(a, frozenset):
        return bool({(type(x), _bits(x)) for x in a} == {(type(x), _bits(x)) for x in b})
    return isinstance(a, (*PLAIN, *_ALSO_PLAIN)) and bool(a == b)


def _bits(value: Any) -> Any:
    if isinstance(value, float):
        return struct.pack("<d", value)
    return struct.pack("<dd", value.real, value.imag) if isinstance(value, complex) else value


def shown(value: Any) -> str:
    """A value as a sentence names it: in full where it is short and plain, else by what it is."""
    if isinstance(value, Unset):
        return "not set"
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if isinstance(value, FunctionType) or type(value).__name__ == "builtin_function_or_method":
        return f"the function {value.__name__}"
    if isinstance(value, nn.Module) or _says_nothing(type(value)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _says_nothing(kind: type) -> bool:
    """Whether objects of a class show their address only."""
    return not any("__repr__" in vars(cls) for cls in kind.__mro__[:-1])


def was_and_is(path: str, then: Any, now: Any) -> str:
    """The sentence that says what changed."""
    was, is_now = shown(then), shown(now)
    return f"{path} was {was} and is {'another' if was == is_now else is_now}"
