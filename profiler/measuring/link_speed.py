"""How fast a host is: copies of two sizes there and back, timed on the machine at hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch

from planner.host_link import HostLink
from profiler.backend import backend_for
from profiler.measuring.hosts import Host, Move

SMALL_BYTES = 1 << 16
# As activations are. From 32 MiB on glibc takes every block from the system anew and gives it back at once: a copy back
# is then three times slower, since the system clears each page before it is written to.
LARGE_BYTES = 1 << 24
ROUNDS = 9
STEPS_A_DECADE = 20  # of round figures: each is 12% above the last


def measured_link(host: Host, device: torch.device) -> HostLink:
    """The link by which copies of both sizes take what they took, in the median and in round figures.

    Round, so that two starts on one machine often ask the same question, whose answer may be kept; and no rounder than
    what steps wait for copies can be predicted by.
    """
    small_out_us, small_in_us = _round_trip_us(host, device, SMALL_BYTES)
    large_out_us, large_in_us = _round_trip_us(host, device, LARGE_BYTES)
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


def _round_trip_us(host: Host, device: torch.device, nbytes: int) -> tuple[float, float]:
    laps = [_lap_us(host, device, nbytes) for _ in range(ROUNDS + 1)][1:]
    return median(out for out, _ in laps), median(back for _, back in laps)


def _lap_us(host: Host, device: torch.device, nbytes: int) -> tuple[float, float]:
    tensor = torch.ones(nbytes, dtype=torch.uint8, device=device)
    moves: list[Move] = []

    def out() -> None:
        moves.append(Move(host, tensor))
        moves[0].away([tensor])

    def back() -> None:
        moves[0].fetch()
        moves[0].back()

    return _us(out, device), _us(back, device)


def _us(action: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    started = time.perf_counter()
    action()
    _synchronize(device)
    return (time.perf_counter() - started) * 1e6


def _synchronize(device: torch.device) -> None:
    backend_for(device).synchronize()
