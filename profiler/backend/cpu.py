"""The CPU: always there, its memory shared with everybody else on the machine."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from profiler.measuring.meters import Meter


@dataclass(frozen=True)
class CpuBackend:
    """The CPU at hand. `root` is where the system's files are."""

    kind: ClassVar[str] = "cpu"
    title: ClassVar[str] = "CPU"
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - never changes
    root: Path = Path("/")

    def count(self) -> None:
        return None

    def meter(self) -> Meter:
        from profiler.measuring.meters import CpuMeter  # which asks for its backend

        return CpuMeter()

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def available_bytes(self) -> int:
        """What the system would give, within the limit of a container."""
        _return_freed()
        found = (_system_bytes(self.root), _group_bytes(self.root))
        return min((n for n in found if n is not None), default=self.total_bytes())

    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def allocated_bytes(self) -> None:
        return None

    def reserved_bytes(self) -> None:
        return None

    def hold_in_one_piece(self, nbytes: int) -> None:
        """Nobody holds what is free."""

    def allocator(self) -> None:
        return None

    def generator(self) -> torch.Generator:
        return torch.default_generator

    def generator_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def copy_streams(self) -> None:
        return None


def _return_freed() -> None:
    """Give the system what glibc keeps of freed memory: gigabytes after a large step, which would count as taken."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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
