"""How fast a host is: copies there and back as a step makes them, timed on the machine at hand.

A lap moves many tensors, one after another in each lane, while ops run beside: copies of one small tensor over and
over find it in the processor's cache (of 4 MiB: two to four times as fast as copies of sixteen). What comes back takes
memory that was just let go of.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from planner.host_link import HostLink
from profiler.backend import backend_for, is_accelerator
from profiler.measuring.hosts import Host, HostError, Move

SMALL_BYTES = 1 << 14
# As activations are. From 32 MiB on glibc takes every block from the system anew and gives it back at once: a copy back
# is then three times slower, since the system clears each page before it is written to.
LARGE_BYTES = 1 << 22
TENSORS = 16  # a lap: together more than caches hold
MOST_LAPS, LEAST_LAPS = 9, 3
ENOUGH_S = 1.0  # after which no further lap is made
SIDE = 256  # of the matrices that are multiplied meanwhile
STEPS_A_DECADE = 20  # of round figures: each is 12% above the last


def measured_link(host: Host, device: torch.device) -> HostLink:
    """The link by which copies of both sizes take what they took, in the median and in round figures.

    Round, so that two starts on one machine often ask the same question, whose answer may be kept; and no rounder than
    what steps wait for copies can be predicted by.
    """
    with _ops_beside(device):
        small_out_us, small_in_us = _copy_us(host, device, SMALL_BYTES)
        large_out_us, large_in_us = _copy_us(host, device, LARGE_BYTES)
    return HostLink(
        out_bytes_per_s=_rounded(_bytes_per_s(small_out_us, large_out_us)),
        in_bytes_per_s=_rounded(_bytes_per_s(small_in_us, large_in_us)),
        latency_us=_rounded(min(small_out_us, small_in_us)),
    )


def _rounded(number: float) -> float:
    step = round(STEPS_A_DECADE * math.log10(max(1.0, number)))
    return float(f"{10 ** (step / STEPS_A_DECADE):.2g}")


def _bytes_per_s(small_us: float, large_us: float) -> float:
    return (LARGE_BYTES - SMALL_BYTES) / max(large_us - small_us, 0.1 * large_us) * 1e6


def _copy_us(host: Host, device: torch.device, nbytes: int) -> tuple[float, float]:
    """What one copy of a lap takes, out and back; a first lap, which writes to new files, is left out."""
    number = _room_for(host, nbytes)
    tensors = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(number)]
    laps: list[tuple[float, float]] = []
    _lap_us(host, device, tensors)
    started = time.perf_counter()
    while len(laps) < LEAST_LAPS or (len(laps) < MOST_LAPS and time.perf_counter() - started < ENOUGH_S):
        laps.append(_lap_us(host, device, tensors))
    return median(out for out, _ in laps) / number, median(back for _, back in laps) / number


def _room_for(host: Host, nbytes: int) -> int:
    """How many tensors a lap may move: fewer where there is little room; HostError without any."""
    number = TENSORS
    while True:
        try:
            host.reserve([nbytes] * number)
        except HostError:
            if number == 1:
                raise
            number //= 2
        else:
            return number


def _lap_us(host: Host, device: torch.device, tensors: list[Tensor]) -> tuple[float, float]:
    """All tensors out, then all of them back; they are others afterwards."""
    moves: list[Move] = []

    def out() -> None:
        moves.extend([Move(host, tensor) for tensor in tensors])
        for move, tensor in zip(moves, tensors, strict=True):
            move.away([tensor])

    def back() -> None:
        for move in moves:
            tensors.pop(0)
            move.fetch()
        tensors.extend(tensor for move in moves for tensor in move.back())

    return _us(out, device), _us(back, device)


def _us(action: Callable[[], None], device: torch.device) -> float:
    backend = backend_for(device)
    backend.synchronize()
    started = time.perf_counter()
    action()
    backend.synchronize()
    return (time.perf_counter() - started) * 1e6


@contextmanager
def _ops_beside(device: torch.device) -> Iterator[None]:
    """Ops on the processors that copies run on too; an accelerator has engines of its own for copies."""
    if is_accelerator(device):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_compute_until, args=(over,), name="ops beside copies")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _compute_until(over: threading.Event) -> None:
    matrix = torch.ones(SIDE, SIDE)
    while not over.is_set():
        torch.mm(matrix, matrix)
