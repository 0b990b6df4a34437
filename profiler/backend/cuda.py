"""NVIDIA's GPUs, and AMD's under the same name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from planner.allocator import Allocator

if TYPE_CHECKING:
    from profiler.measuring.meters import Meter

CYCLES_A_SECOND = 1.5e9  # about: clocks of GPUs run at 1 to 2 GHz


@dataclass(frozen=True)
class CudaBackend:
    """A CUDA device. `api` is torch.cuda, or a stand-in of it in tests."""

    kind: ClassVar[str] = "cuda"
    title: ClassVar[str] = "CUDA"
    device: torch.device
    api: Any = torch.cuda

    def count(self) -> int:
        return int(self.api.device_count())

    def meter(self) -> Meter:
        from profiler.measuring.meters import CudaMeter  # which asks for its backend

        return CudaMeter(self.api, self.device)

    def synchronize(self) -> None:
        self.api.synchronize(self.device)

    def available_bytes(self) -> int:
        """What is free, and what the allocator holds without a tensor in it."""
        free, _ = self.api.mem_get_info(self.device)
        return int(free + self.api.memory_reserved(self.device) - self.api.memory_allocated(self.device))

    def total_bytes(self) -> int:
        return int(self.api.mem_get_info(self.device)[1])

    def allocated_bytes(self) -> int:
        return int(self.api.memory_allocated(self.device))

    def reserved_bytes(self) -> int:
        return int(self.api.memory_reserved(self.device))

    def hold_in_one_piece(self, nbytes: int) -> None:
        """Give back what is free in pieces, then ask for one; it stays with the allocator when it is let go of."""
        self.api.empty_cache()
        self.api.caching_allocator_delete(self.api.caching_allocator_alloc(nbytes, self.device))

    def allocator(self) -> Allocator | None:
        if self.api.get_allocator_backend() != "native":
            return None
        grows = any(segment.get("is_expandable", False) for segment in self.api.memory_snapshot())
        return Allocator.EXPANDABLE if grows else Allocator.CACHING

    def generator(self) -> torch.Generator:
        generator: torch.Generator = self.api.default_generators[self.device.index or 0]
        return generator

    def generator_state(self) -> Tensor:
        state: Tensor = self.api.get_rng_state(self.device)
        return state

    def set_generator_state(self, state: Tensor) -> None:
        self.api.set_rng_state(state, self.device)

    def idle(self, seconds: float) -> None:
        self.api._sleep(int(seconds * CYCLES_A_SECOND))

    def copy_streams(self) -> tuple[Any, Any]:
        return self.api.Stream(self.device), self.api.Stream(self.device)
