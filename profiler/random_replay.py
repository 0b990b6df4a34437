"""Random ops run twice with one draw: the generator's state is saved at the first run and replayed at the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from profiler.backend import backend_for


def generator_state(device: torch.device) -> Tensor:
    """The state of the device's default generator."""
    return backend_for(device).generator_state()


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put the device's default generator where `state` says."""
    backend_for(device).set_generator_state(state)


class SavingRng:
    """Calls a random op and also returns the generator's state from before it drew."""

    def __init__(self, target: Callable[..., Any], device: torch.device) -> None:
        self._target = target
        self._device = device
        self.__name__ = self.__qualname__ = f"saving_rng_{_name(target)}"

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        state = generator_state(self._device)
        return state, self._target(*args, **kwargs)


class ReplayingRng:
    """Calls a random op with a saved state, and leaves the generator where it was."""

    def __init__(self, target: Callable[..., Any], device: torch.device) -> None:
        self._target = target
        self._device = device
        self.__name__ = self.__qualname__ = f"replaying_rng_{_name(target)}"

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        now = generator_state(self._device)
        set_generator_state(self._device, state)
        try:
            return self._target(*args, **kwargs)
        finally:
            set_generator_state(self._device, now)


def _name(target: Callable[..., Any]) -> str:
    return str(getattr(target, "__name__", type(target).__name__)).replace(".", "_")
