"""The way between a device and the memory beside it: how long a copy takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.errors import LinkError

LATENCY_US = 10.0  # to start a copy and to learn that it is done
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bytes a second out of the device's memory and back into it, and what every copy takes besides.

    Both ways work at once. Speeds only say how long copies take: no byte of a plan's peak depends on them.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_us: float = LATENCY_US

    def __post_init__(self) -> None:
        for name, speed in (("out", self.out_bytes_per_s), ("in", self.in_bytes_per_s)):
            if not 0 < speed < math.inf:
                raise LinkError(f"a host link of {speed} bytes/s {name}: give a speed above 0, such as 24e9")
        if not 0 <= self.latency_us < math.inf:
            raise LinkError(f"a host link with {self.latency_us} µs a copy: give a time of 0 or more")

    @staticmethod
    def of(gb_per_s: float, *, latency_us: float = LATENCY_US) -> HostLink:
        """The link of so many GB/s (1e9 bytes) each way, as datasheets state it."""
        return HostLink(out_bytes_per_s=gb_per_s * GIGA, in_bytes_per_s=gb_per_s * GIGA, latency_us=latency_us)

    def out_us(self, nbytes: int) -> float:
        """Time of one copy to the host."""
        return self.latency_us + nbytes / self.out_bytes_per_s * 1e6

    def in_us(self, nbytes: int) -> float:
        """Time of one copy back."""
        return self.latency_us + nbytes / self.in_bytes_per_s * 1e6

    def __str__(self) -> str:
        out, back = self.out_bytes_per_s / GIGA, self.in_bytes_per_s / GIGA
        return f"{out:.3g} GB/s" if out == back else f"{out:.3g} GB/s out and {back:.3g} GB/s in"


def parse_link(text: str | float) -> HostLink:
    """A link as people state it: '24' (GB/s each way) or '24/12' (out and in)."""
    parts = str(text).split("/")
    try:
        speeds = [float(part) for part in parts]
    except ValueError:
        raise LinkError(f"a host link of {text!r}: give GB/s, such as 24, or 24/12 for out and in") from None
    if len(speeds) > 2:
        raise LinkError(f"a host link of {text!r}: give one speed, or two as out/in")
    return HostLink(out_bytes_per_s=speeds[0] * GIGA, in_bytes_per_s=speeds[-1] * GIGA)
