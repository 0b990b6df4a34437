"""The way between processes: how long a collective takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

from planner.errors import LinkError
from planner.host_link import GIGA
from planner.ir import Collective, CollectiveKind, Graph

LATENCY_US = 10.0  # of one message


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLink:
    """Bytes a second that each process sends to the next one while it receives as many, and what every message takes.

    Speeds only say how long collectives take: no byte of a plan's peak depends on them.
    """

    bytes_per_s: float
    latency_us: float = LATENCY_US
    start_us: float = 0.0  # of every collective, however many messages it takes

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise LinkError(
                f"a link between processes of {self.bytes_per_s} bytes/s: give a speed above 0, such as 100e9"
            )
        for time_us, what in ((self.latency_us, "a message"), (self.start_us, "a collective")):
            if not 0 <= time_us < math.inf:
                raise LinkError(f"a link between processes with {time_us} µs {what}: give a time of 0 or more")

    @staticmethod
    def of(gb_per_s: float, *, latency_us: float = LATENCY_US, start_us: float = 0.0) -> GroupLink:
        """The link of so many GB/s (1e9 bytes) each way, as datasheets state it."""
        return GroupLink(bytes_per_s=gb_per_s * GIGA, latency_us=latency_us, start_us=start_us)

    def collective_us(self, work: Collective) -> float:
        """Time of a collective round a ring of processes: latencies, and bytes by bandwidth."""
        hops = _hops(work.kind, work.ranks)
        start_us = self.start_us if hops else 0.0
        return start_us + hops * (self.latency_us + work.nbytes / max(work.ranks, 1) / self.bytes_per_s * 1e6)

    def __str__(self) -> str:
        return f"{self.bytes_per_s / GIGA:.3g} GB/s, {self.latency_us:.3g} µs"


def _hops(kind: CollectiveKind, ranks: int) -> int:
    """How often a part of one rank's size goes from a process to the next, one after the other."""
    if ranks < 2:
        return 0
    match kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return ranks - 1
        case CollectiveKind.BROADCAST:
            return ranks
        case CollectiveKind.ALL_REDUCE | CollectiveKind.OTHER:
            return 2 * (ranks - 1)
        case _:
            assert_never(kind)


def with_group_link(graph: Graph, link: GroupLink) -> Graph:
    """The same graph with collectives as fast as `link` lets them be; launches and waits themselves take nothing."""
    ops = tuple(
        op if op.collective is None else replace(op, time_us=link.collective_us(op.collective) if op.waits else 0.0)
        for op in graph.ops
    )
    return replace(graph, ops=ops).validate()
