"""What holds bytes: numpy arrays, buffers, C values."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from profiler.tracing.guards.kinds.kind import CannotPutBackError, Kind

LARGEST_ARRAY_BYTES = 1 << 20


class Bytes(Kind):
    """What a numpy array holds."""

    probed = False
    by_value = True

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": (str(what.dtype), what.shape, what.strides, what.tobytes())}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        dtype, shape, strides, content = before[""]
        if (str(what.dtype), what.shape, what.strides) != (dtype, shape, strides) or not what.flags.writeable:
            raise CannotPutBackError
        what[...] = np.frombuffer(content, dtype=what.dtype).reshape(shape)

    def label(self, path: str, key: Any) -> str:
        return f"the content of {path}"


class Objects(Kind):
    """What a numpy array of objects holds."""

    probed = False

    def read(self, what: Any) -> dict[Any, Any]:
        return {"shape": what.shape} | dict(enumerate(what.flat))

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        if what.shape != before["shape"]:
            raise CannotPutBackError
        for i in range(what.size):
            what.flat[i] = before[i]

    def label(self, path: str, key: Any) -> str:
        return f"{path}.shape" if key == "shape" else f"entry {key} of {path}"


class Content(Kind):
    """What a piece of raw memory holds: a bytearray, an array of the standard library, a view of either."""

    probed = False
    by_value = True

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": bytes(what)}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        content = before[""]
        if len(bytes(what)) != len(content) and isinstance(what, bytearray):
            what[:] = content
        elif len(bytes(what)) != len(content) or memoryview(what).readonly:
            raise CannotPutBackError
        else:
            memoryview(what).cast("B")[:] = content

    def label(self, path: str, key: Any) -> str:
        return f"the content of {path}"


class Number(Kind):
    """What a C value of ctypes or multiprocessing holds."""

    probed = False
    by_value = True

    def read(self, what: Any) -> dict[Any, Any]:
        return {"": what.value if isinstance(what, ctypes._SimpleCData) else bytes(what)}

    def write(self, what: Any, before: Mapping[Any, Any]) -> None:
        if isinstance(what, ctypes._SimpleCData):
            what.value = before[""]
        else:
            ctypes.memmove(ctypes.addressof(what), before[""], len(before[""]))

    def label(self, path: str, key: Any) -> str:
        return f"the content of {path}"
