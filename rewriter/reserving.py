"""One piece of a GPU's memory, asked for before training: what a planned step makes then lies in it."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from planner.arena import arrange
from planner.errors import BudgetError
from planner.ir import Graph
from planner.schedule import Schedule
from planner.solve import Solution
from planner.units import human_bytes
from profiler.backend import backend_for, is_accelerator
from profiler.measuring.memory import allocator_of, guarded
from rewriter.telling import warn_caller

log = logging.getLogger("recompute_planner")


class Reserve(Enum):
    """What is asked of a GPU's allocator before the first planned step."""

    NOTHING = "nothing"
    ARENA = "arena"  # one piece as large as the arena of the step


def read_reserve(reserve: str | None, device: torch.device, api: Any = None) -> Reserve:
    """What a user asked for; BudgetError where there is no such thing, or no allocator that holds anything.

    `api` is a stand-in of torch.cuda in tests.
    """
    if reserve is None:
        return Reserve.NOTHING
    if reserve != Reserve.ARENA.value:
        raise BudgetError(f"reserve={reserve!r:.60}: there is 'arena', or None to reserve nothing")
    if not is_accelerator(device):
        raise BudgetError(
            f"reserve='arena' is for the allocator of a GPU, but the model is on {device}, where nothing is held that "
            "does not live: leave it out"
        )
    if allocator_of(device, api) is None:
        raise BudgetError(f"reserve='arena': the allocator in use on {device} is not PyTorch's own caching one")
    return Reserve.ARENA


class Ahead:
    """What one door has had reserved on its device: one piece, large enough for the largest form so far."""

    def __init__(self, reserve: Reserve, device: torch.device) -> None:
        self._reserve, self._device = reserve, device
        self._nbytes = 0

    def hold_for(self, graph: Graph, solution: Solution) -> None:
        """Where it was asked for, hold a piece that a planned form of `graph` lies in; told where that costs memory."""
        if self._reserve is Reserve.NOTHING:
            return
        assert solution.schedule is not None
        advice = better_without(solution)
        if advice:
            warn_caller(advice)
        self._nbytes = reserve_arena(graph, solution.schedule, self._device, held_bytes=self._nbytes)


def better_without(solution: Solution) -> str:
    """What to say where the allocator would hold less without the piece, by simulation; "" where it would not."""
    assert solution.schedule is not None
    alone = replace(solution.problem, reserves_ahead=False).held(solution.schedule)
    if alone is None or solution.held is None or solution.held.reserved_bytes <= alone.reserved_bytes:
        return ""
    return (
        f"with reserve='arena' the GPU's allocator holds {human_bytes(solution.held.reserved_bytes)} by simulation, "
        f"and {human_bytes(alone.reserved_bytes)} without it: leave it out, or set expandable_segments:True"
    )


def reserve_arena(
    graph: Graph, schedule: Schedule, device: torch.device, *, held_bytes: int = 0, api: Any = None
) -> int:
    """Have the allocator hold one piece as large as the arena of `schedule`; returns its bytes.

    Nothing is done where it holds a piece of `held_bytes` already that is large enough. OutOfMemory where the card does
    not have so much in one piece; nothing is held then.
    """
    nbytes = arrange(graph, schedule).nbytes
    if nbytes <= held_bytes:
        return held_bytes
    backend = backend_for(device, api)
    gc.collect()  # what nobody holds any more must not lie in the way
    guarded(f"reserving {human_bytes(nbytes)} in one piece", lambda: backend.hold_in_one_piece(nbytes))
    log.info("reserved %s in one piece on %s", human_bytes(nbytes), device)
    return nbytes
