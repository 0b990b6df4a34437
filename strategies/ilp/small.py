"""What the program says of storages too small to be decided about: it keeps them, and its bound still holds.

A plan may drop one, and then reruns its maker. Where the program reruns that maker anyway, the bytes are not counted.
Where it does not, they can be had back for the time of the maker alone: bytes with about the same price share a
variable at the lowest price among them. So the program counts no byte that a plan could be without for less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.analysis import idle_after
from strategies.ilp.reduction import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A small storage that `maker` makes: idle after `freed` until `first`, then used until `last`."""

    nbytes: int
    maker: int
    freed: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """All these bytes are to be had back for no less than this time, and parts of them in proportion."""

    nbytes: int
    time_us: float


def idle_small(reduction: Reduction) -> tuple[Small, ...]:
    """The small storages that idle, but for those whose makers take no time: they come back for nothing."""
    return tuple(_idle_small(reduction))


def _idle_small(reduction: Reduction) -> Iterator[Small]:
    graph = reduction.graph
    for storage in reduction.small:
        maker, freed = graph.maker[storage], idle_after(graph, storage)
        later = [r for r in graph.readers[storage] if r > freed]
        nbytes = graph.storages[storage].nbytes
        if maker is not None and later and nbytes and graph.ops[maker].time_us > 0:
            yield Small(nbytes=nbytes, maker=maker, freed=freed, first=later[0], last=later[-1])


def prices(reduction: Reduction, small: tuple[Small, ...]) -> tuple[Price, ...]:
    """What it takes at least to be without small storages; those within a factor of ten share a price."""
    made: dict[int, int] = {}
    for s in small:
        made[s.maker] = made.get(s.maker, 0) + s.nbytes
    alike: dict[int, list[tuple[int, float]]] = {}
    for maker, nbytes in made.items():
        time_us = reduction.graph.ops[maker].time_us
        alike.setdefault(math.floor(math.log10(time_us / nbytes)), []).append((nbytes, time_us))
    return tuple(_shared(alike[decade]) for decade in sorted(alike))


def _shared(parts: list[tuple[int, float]]) -> Price:
    nbytes = sum(n for n, _ in parts)
    return Price(nbytes=nbytes, time_us=nbytes * min(time_us / n for n, time_us in parts))
