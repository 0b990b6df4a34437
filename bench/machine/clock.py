"""Seconds of a call on a device, and what is made of many: one way for every command that times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from profiler.backend import backend_for
from profiler.tracing.whole_step import TracedStep

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one call took: by the clock, and of all of this process's threads on processors."""

    wall_s: float
    cpu_s: float

    def over(self, other: Taken) -> Taken:
        """Both as ratios to another's; 1 of processor time where that took none that could be counted."""
        cpu = self.cpu_s / other.cpu_s if other.cpu_s else 1.0
        return Taken(wall_s=self.wall_s / other.wall_s, cpu_s=cpu)


class Clock:
    """Wall-clock seconds of calls; a GPU has finished before each one starts and before it counts as done.

    `api` is a stand-in of torch.cuda in tests.
    """

    def __init__(self, device: torch.device, api: Any = None) -> None:
        self._backend = backend_for(device, api)

    def timed(self, call: Callable[[], T]) -> tuple[float, T]:
        """Seconds, and what the call returned."""
        self._backend.synchronize()
        started = time.perf_counter()
        result = call()
        self._backend.synchronize()
        return time.perf_counter() - started, result

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds; what the call returns is let go after the clock has stopped."""
        return self.timed(call)[0]

    def taken(self, call: Callable[[], Any]) -> Taken:
        """Seconds by the clock and on processors; the latter are steadier where other work runs beside."""
        started = time.process_time()
        wall_s, result = self.timed(call)
        cpu_s = time.process_time() - started
        del result
        return Taken(wall_s=wall_s, cpu_s=cpu_s)


def gradients_put_back(traced: TracedStep) -> Callable[[], None]:
    """What gives parameters the `.grad`s of now again, where the captured step minds which it begins with.

    A step that never clears them leaves others behind. Those that are cleared unread stay: clearing is part of a step.
    """
    minded = [slot.tensor() for slot, _ in traced.convention.guards.gradients]
    begun = [(p, p.grad) for p in minded]

    def put_back() -> None:
        for p, gradient in begun:
            p.grad = gradient

    return put_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The middle of several readings, and their quartiles."""

    median: float
    low: float
    high: float


def spread(readings: Sequence[float]) -> Spread | None:
    """Median and quartiles; None without a reading."""
    if not readings:
        return None
    ordered = sorted(readings)
    return Spread(
        median=statistics.median(ordered), low=ordered[len(ordered) // 4], high=ordered[(3 * len(ordered)) // 4]
    )
