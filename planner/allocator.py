"""What PyTorch's caching allocator holds of a GPU while a schedule runs: more than what lives at once.

A simulation of `DeviceCachingAllocator` in PyTorch's c10/cuda/CUDACachingAllocator.cpp, for one stream and a card that
is large enough: sizes are rounded up, small and large blocks come from pools of their own, the smallest free block that
fits is taken and split, neighbours that are free become one again, and nothing is given back to the device. (A card
that is full makes the real one give back segments that are wholly free and ask again, at a cost in time.)
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from planner.blocks import Block, blocks, requests, start_sizes
from planner.ir import Graph
from planner.schedule import Schedule

log = logging.getLogger("recompute_planner")

# c10/core/AllocatorConfig.h (in older versions CUDACachingAllocator.cpp), under the names in brackets.
BLOCK_BYTES = 512  # sizes are multiples of it (kMinBlockSize)
SMALL_BYTES = 1 << 20  # the largest size that the small pool serves (kSmallSize)
SMALL_SEGMENT_BYTES = 2 << 20  # what is asked of the device for the small pool (kSmallBuffer)
LARGE_SEGMENT_BYTES = 20 << 20  # ... for a size that is not small and below the next one (large_segment_size)
OWN_SEGMENT_BYTES = 10 << 20  # from this size on a segment of its own is asked for (kMinLargeAlloc), ...
ROUND_BYTES = 2 << 20  # ... rounded up to a multiple of this (kRoundLarge)

STEPS = 10  # so many are simulated at most: as a rule the second leaves what it found, and so would all others


class Allocator(Enum):
    """How memory is asked of a GPU."""

    CACHING = "PyTorch's caching allocator"
    EXPANDABLE = "PyTorch's caching allocator with expandable_segments:True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an allocator holds of the device at most, and how much of it is in use at most, in bytes."""

    reserved_bytes: int
    allocated_bytes: int
    requests: int  # to the device: each of them makes the GPU wait


def held(
    graph: Graph,
    schedule: Schedule,
    *,
    allocator: Allocator = Allocator.CACHING,
    steps: int = STEPS,
    ahead_bytes: int = 0,
) -> Held:
    """What `allocator` holds for the step and for all that is live before it, over so many steps one after another.

    What a step leaves (its loss, gradients) is let go of when the next one begins. `ahead_bytes` are asked for in one
    piece, and let go of, before the first step: what is large then lies in that piece.
    """
    memory = CachingAllocator(expandable=allocator is Allocator.EXPANDABLE)
    for nbytes in start_sizes(graph):
        memory.allocate(nbytes)
    if ahead_bytes:
        memory.free(memory.allocate(ahead_bytes))
    found, free = blocks(graph, schedule), memory.free_pieces
    told = requests(found)
    for _ in range(steps):
        _run(memory, found, told)
        before, free = free, memory.free_pieces
        if free == before:
            break
    return Held(
        reserved_bytes=memory.reserved_bytes,
        allocated_bytes=memory.most_allocated_bytes,
        requests=memory.device_requests,
    )


def _run(memory: CachingAllocator, found: Sequence[Block], told: Iterable[tuple[int, int, bool]]) -> None:
    pieces: dict[int, Piece] = {}
    for _, block, begins in told:
        if begins:
            pieces[block] = memory.allocate(found[block].nbytes)
        else:
            memory.free(pieces.pop(block))


# -- the allocator ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of a segment, in use or free, between its neighbours in the segment."""

    address: int
    nbytes: int
    small: bool
    in_use: bool = False
    before: Piece | None = None
    after: Piece | None = None


class _Pool:
    """The free pieces of the small or of the large sizes, by size and then by address."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.pieces: dict[int, Piece] = {}  # by address

    def add(self, piece: Piece) -> None:
        insort(self.keys, (piece.nbytes, piece.address))
        self.pieces[piece.address] = piece

    def remove(self, piece: Piece) -> None:
        del self.keys[bisect_left(self.keys, (piece.nbytes, piece.address))]
        del self.pieces[piece.address]

    def at_least(self, nbytes: int) -> list[Piece]:
        """The two smallest free pieces that are large enough, or fewer."""
        first = bisect_left(self.keys, (nbytes, -1))
        return [self.pieces[address] for _, address in self.keys[first : first + 2]]


class CachingAllocator:
    """The allocator of one device and one stream.

    With `expandable`, each pool has one segment that grows at its end (expandable_segments:True).
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.expandable = expandable
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.most_allocated_bytes = 0
        self.device_requests = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._ends: dict[bool, Piece] = {}  # the last piece of each pool's growing segment
        self._next_address = 0

    def allocate(self, nbytes: int) -> Piece:
        """A piece of at least so many bytes (malloc)."""
        size = rounded(nbytes)
        small = size <= SMALL_BYTES
        piece = self._free_piece(size, small) or self._from_device(size, small)
        if self._is_worth_splitting(piece, size):
            self._split(piece, size)
        piece.in_use = True
        self.allocated_bytes += piece.nbytes
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
        return piece

    def free(self, piece: Piece) -> None:
        """Back into its pool, joined with free neighbours (free_block, try_merge_blocks)."""
        self.allocated_bytes -= piece.nbytes
        piece.in_use = False
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and not neighbour.in_use:
                self._pools[piece.small].remove(neighbour)
                self._absorb(piece, neighbour)
        self._pools[piece.small].add(piece)

    @property
    def free_pieces(self) -> tuple[tuple[int, int], ...]:
        """Bytes and address of all that is free."""
        return (*self._pools[True].keys, *self._pools[False].keys)

    def _free_piece(self, size: int, small: bool) -> Piece | None:
        """The smallest free piece that is large enough, out of its pool (get_free_block).

        The one that can grow counts as larger than all others.
        """
        found = self._pools[small].at_least(size)
        if not found:
            return None
        piece = found[-1] if self._ends.get(small) is found[0] else found[0]
        self._pools[small].remove(piece)
        return piece

    def _from_device(self, size: int, small: bool) -> Piece:
        self.device_requests += 1
        if self.expandable:
            return self._grown(size, small)
        nbytes = segment_bytes(size)
        self.reserved_bytes += nbytes
        return self._new_piece(nbytes, small)

    def _new_piece(self, nbytes: int, small: bool) -> Piece:
        piece = Piece(address=self._next_address, nbytes=nbytes, small=small)
        self._next_address += nbytes
        return piece

    def _grown(self, size: int, small: bool) -> Piece:
        """The free end of the pool's one segment, grown by whole pages to `size` (try_allocate_expandable_block)."""
        page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        end = self._ends.get(small)
        free = end if end is not None and not end.in_use else None
        more = page * -(-(size - (free.nbytes if free else 0)) // page)
        self.reserved_bytes += more
        if free is not None:
            self._pools[small].remove(free)
            free.nbytes += more
            return free
        # Each pool has address space of its own, as large as it may ever want.
        address = (0 if small else 1 << 60) if end is None else end.address + end.nbytes
        grown = Piece(address=address, nbytes=more, small=small, before=end)
        if end is not None:
            end.after = grown
        self._ends[small] = grown
        return grown

    def _is_worth_splitting(self, piece: Piece, size: int) -> bool:
        """Whether what is left of a piece is kept for others (should_split)."""
        rest = piece.nbytes - size
        return rest >= BLOCK_BYTES if piece.small or self.expandable else rest > SMALL_BYTES

    def _split(self, piece: Piece, size: int) -> None:
        """Cut `piece` down to `size`; the rest, above it, is free."""
        rest = Piece(
            address=piece.address + size,
            nbytes=piece.nbytes - size,
            small=piece.small,
            before=piece,
            after=piece.after,
        )
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.nbytes = rest, size
        if self._ends.get(piece.small) is piece:
            self._ends[piece.small] = rest
        self._pools[piece.small].add(rest)

    def _absorb(self, piece: Piece, neighbour: Piece) -> None:
        if piece.before is neighbour:
            piece.address, piece.before = neighbour.address, neighbour.before
            if piece.before is not None:
                piece.before.after = piece
        else:
            piece.after = neighbour.after
            if piece.after is not None:
                piece.after.before = piece
        piece.nbytes += neighbour.nbytes
        if self._ends.get(piece.small) is neighbour:
            self._ends[piece.small] = piece


def rounded(nbytes: int) -> int:
    """The size of the block that serves a request (round_size, without divisions of powers of two)."""
    return max(BLOCK_BYTES, -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES)


def segment_bytes(size: int) -> int:
    """What is asked of the device for a block that no free one serves (get_allocation_size)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_BYTES) * ROUND_BYTES
