"""How much memory a device can still give, and what happens where it gives out."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.errors import PlannerError

T = TypeVar("T")

# How the CPU's allocator says it; it raises a plain RuntimeError.
_CPU_WORDS = ("can't allocate memory", "not enough memory")


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


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
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemory(f"out of memory while {what}: {said}")


def available_bytes(device: torch.device, api: Any = torch.cuda, *, root: Path = Path("/")) -> int:
    """What can still be allocated there: on a GPU free and cached memory, on the CPU what the system would give.

    `api` is torch.cuda, or a stand-in of it in tests; `root` is where the system's files are.
    """
    if device.type == "cuda":
        free, _ = api.mem_get_info(device)
        return int(free + api.memory_reserved(device) - api.memory_allocated(device))
    _return_freed()
    found = (_system_bytes(root), _group_bytes(root))
    return min((n for n in found if n is not None), default=_physical_bytes())


def _return_freed() -> None:
    """Give the system what glibc keeps of freed memory: gigabytes after a large step, which would count as taken."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _system_bytes(root: Path) -> int | None:
    """Linux's own estimate of what can be had without swapping."""
    file = root / "proc/meminfo"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _group_bytes(root: Path) -> int | None:
    """What the limit of a container leaves, cached files that it can let go included; None without a limit."""
    group = root / "sys/fs/cgroup"
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = (_number(group / name) for name in (limit, used))
        if most is not None and now is not None:
            return max(0, most - now + _entry((group / limit).with_name("memory.stat"), cached))
    return None


def _entry(file: Path, name: str) -> int:
    """A number of a file of names and numbers; 0 where it is not there."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _number(file: Path) -> int | None:
    text = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def live_bytes(device: torch.device, *, without: Iterable[Tensor], api: Any = torch.cuda) -> int:
    """What tensors hold on a device now, those that share memory with `without` left out.

    On the CPU, where no allocator tells, every tensor that Python knows of is counted.
    """
    known = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in without if t.layout == torch.strided}
    if device.type == "cuda":
        return int(api.memory_allocated(device) - sum(known.values()))
    seen: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and type(found).__module__.partition(".")[0] == "torch":
            _count(found, device, seen)
    return sum(nbytes for key, nbytes in seen.items() if key not in known)


def _count(tensor: Tensor, device: torch.device, seen: dict[int, int]) -> None:
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided or tensor.device != device:
        return
    storage = tensor.untyped_storage()
    seen[storage._cdata] = storage.nbytes()
