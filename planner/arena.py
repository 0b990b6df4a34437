"""One piece of memory for a whole step: an offset for every block that its schedule asks for.

Blocks that are never in use at one time share addresses, so that one allocation of about the peak serves the step,
whatever an allocator would lose between its blocks.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.blocks import Block, blocks
from planner.errors import PlanError
from planner.ir import Graph
from planner.schedule import Schedule

log = logging.getLogger("recompute_planner")

ALIGNMENT_BYTES = 512  # of what CUDA hands out, and more than a kernel on a CPU asks for
MOST_ROUNDS = 40  # each places every block anew
ENOUGH = 1e-4  # an arena this close to the smallest possible is not improved on
PROMOTION = 20.0  # how much longer-lived a block counts from then on, each time that it sticks out

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Where the blocks of a schedule lie; what is live before the step lies elsewhere.

    `live_bytes` is the most that is in use at once, every block rounded up to the alignment: no arena is smaller.
    """

    blocks: tuple[Block, ...]
    offsets: tuple[int, ...]  # one for each block
    nbytes: int
    live_bytes: int
    alignment_bytes: int = ALIGNMENT_BYTES

    @property
    def waste(self) -> float:
        """What the arena is larger than what must lie in it at once, as a fraction of that."""
        return self.nbytes / self.live_bytes - 1 if self.live_bytes else 0.0


def arrange(graph: Graph, schedule: Schedule, *, alignment_bytes: int = ALIGNMENT_BYTES) -> Arena:
    """An arena for everything that `schedule` makes, checked. The same schedule gives the same arena.

    The offset that is lowest takes the longest-lived block that fits there (the best-fit heuristic of Sekiyama, Imai,
    Negishi and Kawachiya, "Profile-guided memory optimization for deep neural networks", 2018). While some blocks lie
    above what must be in use at once, all are placed anew, with those counted as longer-lived.
    """
    started = time.perf_counter()
    arena = arranged(blocks(graph, schedule), alignment_bytes=alignment_bytes)
    seconds, count = time.perf_counter() - started, len(arena.blocks)
    log.info("arena of %s: %d blocks, %.3f%% wasted, in %.2f s", graph.name, count, 100 * arena.waste, seconds)
    return arena


def arranged(found: Sequence[Block], *, alignment_bytes: int = ALIGNMENT_BYTES) -> Arena:
    """An arena for these blocks alone, checked."""
    first, last = _numbers([b.first_step for b in found]), _numbers([b.last_step for b in found])
    sizes = -(-_numbers([b.nbytes for b in found]) // alignment_bytes) * alignment_bytes
    live_bytes = most_at_once(first, last, sizes)
    offsets = _offsets(first, last, sizes, live_bytes)
    arena = Arena(
        blocks=tuple(found),
        offsets=tuple(map(int, offsets)),
        nbytes=int((offsets + sizes).max(initial=0)),
        live_bytes=live_bytes,
        alignment_bytes=alignment_bytes,
    )
    check_arena(arena)
    return arena


def _numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


def most_at_once(first: Numbers, last: Numbers, sizes: Numbers) -> int:
    """The most bytes in use at one step, by blocks that live from `first` to `last`."""
    change = np.zeros(int(last.max(initial=-1)) + 2, dtype=np.int64)
    np.add.at(change, first, sizes)
    np.add.at(change, last + 1, -sizes)
    return int(np.cumsum(change).max())


def _offsets(first: Numbers, last: Numbers, sizes: Numbers, live_bytes: int) -> Numbers:
    """The lowest arrangement of several rounds."""
    priority = np.log(last - first + 1.0)
    best, least = np.zeros_like(sizes), np.inf
    for _ in range(MOST_ROUNDS):
        offsets = _Skyline(first, last, sizes, priority).place()
        height = int((offsets + sizes).max(initial=0))
        if height < least:
            best, least = offsets, height
        if least <= (1 + ENOUGH) * live_bytes:
            break
        priority = priority + np.log(PROMOTION) * (offsets + sizes > live_bytes)
    return best


class _Skyline:
    """The upper edge of what was placed so far: stretches of steps, each with its height."""

    def __init__(self, first: Numbers, last: Numbers, sizes: Numbers, priority: npt.NDArray[np.float64]) -> None:
        self.order = np.lexsort((-sizes, -priority))
        self.first, self.last, self.sizes = first[self.order], last[self.order], sizes[self.order]
        self.waiting = np.ones(len(sizes), dtype=bool)  # in order of priority, like the three above
        self.starts = [0]
        self.ends = [int(last.max(initial=0))]
        self.heights = [0]

    def place(self) -> Numbers:
        """The offset of every block: the lowest stretch takes the first block that fits, or is filled up."""
        offsets = np.zeros(len(self.order), dtype=np.int64)
        left = len(self.order)
        while left:
            stretch = self.heights.index(min(self.heights))
            fitting = self.waiting & (self.first >= self.starts[stretch]) & (self.last <= self.ends[stretch])
            block = int(fitting.argmax())
            if not fitting[block]:
                self._fill_up(stretch)
                continue
            offsets[self.order[block]] = self.heights[stretch]
            self.waiting[block] = False
            self._put(stretch, block)
            left -= 1
        return offsets

    def _fill_up(self, stretch: int) -> None:
        """Nothing fits: give the stretch the height of its lower neighbour. The whole width takes every block."""
        beside = self.heights[max(0, stretch - 1) : stretch] + self.heights[stretch + 1 : stretch + 2]
        self.heights[stretch] = min(beside)
        self._join(stretch)

    def _put(self, stretch: int, block: int) -> None:
        start, end, height = self.starts[stretch], self.ends[stretch], self.heights[stretch]
        first, last = int(self.first[block]), int(self.last[block])
        pieces = [(start, first - 1, height), (first, last, height + int(self.sizes[block])), (last + 1, end, height)]
        pieces = [piece for piece in pieces if piece[0] <= piece[1]]
        self.starts[stretch : stretch + 1] = [piece[0] for piece in pieces]
        self.ends[stretch : stretch + 1] = [piece[1] for piece in pieces]
        self.heights[stretch : stretch + 1] = [piece[2] for piece in pieces]
        self._join(stretch + (first > start))

    def _join(self, stretch: int) -> None:
        """Make one stretch of it and the neighbours of its height."""
        for left in (stretch, stretch - 1):
            if 0 <= left < len(self.heights) - 1 and self.heights[left] == self.heights[left + 1]:
                self.ends[left] = self.ends[left + 1]
                del self.starts[left + 1], self.ends[left + 1], self.heights[left + 1]


def check_arena(arena: Arena) -> None:
    """PlanError unless every block lies in the arena, aligned, apart from all that are in use while it is.

    It knows nothing of how the offsets were found: blocks are laid down and taken up step by step.
    """
    begins, ends = dict[int, list[int]](), dict[int, list[int]]()
    for i, block in enumerate(arena.blocks):
        begins.setdefault(block.first_step, []).append(i)
        ends.setdefault(block.last_step + 1, []).append(i)
    down: list[tuple[int, int]] = []  # offset and block of what is in use, by address
    for step in sorted({*begins, *ends}):
        for i in ends.get(step, ()):
            down.remove((arena.offsets[i], i))
        for i in begins.get(step, ()):
            _lay_down(arena, down, i)


def _lay_down(arena: Arena, down: list[tuple[int, int]], i: int) -> None:
    offset, end = arena.offsets[i], arena.offsets[i] + arena.blocks[i].nbytes
    if offset < 0 or end > arena.nbytes or offset % arena.alignment_bytes:
        raise PlanError(f"block {i} lies at {offset:,} to {end:,} of an arena of {arena.nbytes:,} bytes")
    place = bisect_left(down, (offset, i))
    for other in [pair[1] for pair in down[max(0, place - 1) : place + 1]]:
        if offset < arena.offsets[other] + arena.blocks[other].nbytes and arena.offsets[other] < end:
            raise PlanError(
                f"blocks {other} and {i} are both in use at step {arena.blocks[i].first_step}, and lie on one another: "
                f"{arena.offsets[other]:,} and {offset:,} of the arena"
            )
    down.insert(place, (offset, i))
