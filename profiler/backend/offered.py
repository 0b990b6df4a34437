"""What every device has to offer to be planned for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from planner.allocator import Allocator

if TYPE_CHECKING:
    from profiler.measuring.meters import Meter


class Backend(Protocol):
    """A device that a model can lie on."""

    kind: ClassVar[str]  # as in torch.device(kind)
    title: ClassVar[str]  # for people

    @property
    def device(self) -> torch.device: ...

    def count(self) -> int | None:
        """How many of its kind there are; None where any number of processes may share the one."""

    def meter(self) -> Meter:
        """Its clock, and the eyes on its allocator."""

    def synchronize(self) -> None:
        """Wait until all that was asked of it is done."""

    # -- memory -----------------------------------------------------------------------------------------------

    def available_bytes(self) -> int:
        """What can still be allocated on it."""

    def total_bytes(self) -> int:
        """All the memory it has."""

    def allocated_bytes(self) -> int | None:
        """What tensors hold on it, by its allocator's own count; None where no allocator tells."""

    def reserved_bytes(self) -> int | None:
        """What its allocator holds, tensors in it or not; None where no allocator tells."""

    def hold_in_one_piece(self, nbytes: int) -> None:
        """Have its allocator hold so many bytes next to one another, free; nothing where none holds what is free."""

    def allocator(self) -> Allocator | None:
        """Who hands out its memory, where that one holds more than what lives and can be simulated."""

    # -- generators -------------------------------------------------------------------------------------------

    def generator(self) -> torch.Generator:
        """Its default generator."""

    def generator_state(self) -> Tensor:
        """Where its default generator stands."""

    def set_generator_state(self, state: Tensor) -> None:
        """Put its default generator where `state` says."""

    # -- streams ----------------------------------------------------------------------------------------------

    def idle(self, seconds: float) -> None:
        """Keep the current stream from going on for about so long; where there are none, the current thread."""

    def copy_streams(self) -> tuple[Any, Any] | None:
        """A stream for copies to the host and one for copies back, beside the ops; None where copies are ops."""
