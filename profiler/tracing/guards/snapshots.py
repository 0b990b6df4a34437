"""What is put back after a step was tried, beside what guards look after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from profiler.tracing.fake_tensors.patches import refill


class Snapshots:
    """States of objects as they were when they were first seen."""

    def __init__(self) -> None:
        self._restorers: list[Callable[[], None]] = []

    def note_module(self, module: nn.Module) -> None:
        """A module that is not the model's: its parameters, buffers, children, hooks and modes, not their values."""
        self.note_attributes(module)
        for value in vars(module).values():
            if isinstance(value, dict):
                self._restorers.append(partial(refill, value, dict(value)))

    def note_attributes(self, owner: Any) -> None:
        """What an object has in its `__dict__`, where no guard minds what turns up there."""
        self._restorers.append(partial(refill, vars(owner), dict(vars(owner))))

    def note_generator(self, generator: torch.Generator) -> None:
        """A generator of torch's that belongs to the user."""
        with _disable_current_modes():
            self._restorers.append(partial(_set_state, generator, generator.get_state()))

    def note_long(self, entries: list[Any]) -> None:
        """A list with more entries than are watched: what a step appends to it goes."""
        self._restorers.append(partial(_shorten, entries, len(entries)))

    def put_back(self) -> None:
        """Everything as it was."""
        for restore in reversed(self._restorers):
            restore()


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    with _disable_current_modes():
        generator.set_state(state)


def _shorten(entries: list[Any], length: int) -> None:
    del entries[length:]
