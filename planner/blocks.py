"""What an allocator is asked for while a schedule runs: one block for everything that it makes, from step to step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from planner.ir import Graph
from planner.schedule import Schedule
from planner.walk import Event, Freed, Launched, Ran, Waited, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Bytes in use from one step of a schedule to another, both included.

    `tenants` are the storages that lie in it, each with the step from which it does: an op that writes over a dying
    input hands the input's block on. It has none where it is a step's own: a workspace, or a copy dropped at once.
    """

    nbytes: int
    first_step: int
    last_step: int
    tenants: tuple[tuple[int, int], ...] = ()


def blocks(graph: Graph, schedule: Schedule) -> tuple[Block, ...]:
    """A block for everything that the schedule makes, in the order of its making; nothing without bytes has one.

    What is live before the step has none: it was allocated by somebody else.
    """
    found: list[Block] = []
    block_of: dict[int, int] = {}  # resident storage -> its block
    last_step = len(schedule.steps) - 1
    for position, event in enumerate(walk(graph, schedule)):
        ended = [block_of.pop(storage) for storage in event.freed if storage in block_of]
        handed_on = ended if _runs_in_place(event) else []
        for block in () if handed_on else ended:
            found[block] = replace(found[block], last_step=position - 1)
        for storage in event.made:
            nbytes = graph.storages[storage].nbytes
            if nbytes == 0:
                continue
            if not handed_on:
                found.append(Block(nbytes=nbytes, first_step=position, last_step=last_step))
            block = block_of[storage] = handed_on.pop() if handed_on else len(found) - 1
            found[block] = replace(found[block], tenants=(*found[block].tenants, (storage, position)))
        found += [Block(nbytes=n, first_step=position, last_step=position) for n in _own(graph, event)]
    return tuple(found)


def _runs_in_place(event: Event) -> bool:
    """Whether what the step ends is where it writes what it makes."""
    match event:
        case Ran():
            return event.step.into is not None and len(event.made) == 1
        case Freed() | Launched() | Waited():
            return False
        case _:
            assert_never(event)


def _own(graph: Graph, event: Event) -> Iterator[int]:
    """The bytes of each block that is there only during a step; they add up to the event's transient bytes."""
    match event:
        case Ran():
            copies = [s for s in graph.makes[event.op.id] if s not in event.made]
            if event.again and event.op.rng_state is not None:
                copies.append(event.op.rng_state)  # where the generator stands, put back after the replay
            yield from filter(None, (event.op.workspace_bytes, *(graph.storages[s].nbytes for s in copies)))
        case Freed() | Launched() | Waited():
            pass
        case _:
            assert_never(event)


def start_sizes(graph: Graph) -> tuple[int, ...]:
    """The bytes of every storage that is live before the step, in id order; nothing without bytes."""
    started = {value.storage for value in graph.values if value.producer is None}
    return tuple(graph.storages[s].nbytes for s in sorted(started) if graph.storages[s].nbytes)


def requests(found: Sequence[Block]) -> list[tuple[int, int, bool]]:
    """(step, block, whether it is asked for or let go of) in the order in which an allocator is told.

    What a step has of its own is let go of at its end, before what dies after it.
    """
    told: list[tuple[int, int, int]] = []  # twice the step, which of what is at once, block
    for i, block in enumerate(found):
        told.append((2 * block.first_step, 0, i))
        told.append((2 * block.last_step + 1, 2 if block.tenants else 1, i))
    return [(moment // 2, block, moment % 2 == 0) for moment, _, block in sorted(told)]
