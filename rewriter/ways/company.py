"""Forwards that are alive together: what one has to leave free for the others, and a plan that does.

A plan is for one forward and its backward. A loop that goes backward from several forwards at once, or twice through
one (`retain_graph=True`), holds what more than one of them saves: with a budget in bytes that belongs into the plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from planner.analysis import floor
from planner.schedule import Run
from planner.solve import Problem, Solution, Status
from planner.units import human_bytes
from planner.walk import Ran, walk
from profiler.backend import is_accelerator
from profiler.measuring.memory import live_bytes
from profiler.tracing.joint import OUTSIDE_NAME
from rewriter.budgets import OverBudget

# So often a smaller budget is tried, each time half way between what was too little and what was too much.
TRIES = 7

_open: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()  # forwards of all planned models


class _Held(NamedTuple):
    """What a planned forward holds until its backward."""

    nbytes: int
    memory: Collection[int]  # of the tensors that Python may know: their storages


def begin(forward: Any, *, held_bytes: int, memory: Collection[int]) -> None:
    """A planned forward holds so much, `memory` among it, until it is gone or `end` is called."""
    _open[forward] = _Held(held_bytes, memory)


def end(forward: Any) -> None:
    """A backward has come, and lets go of what its forward held."""
    _open.pop(forward, None)


def open_bytes() -> int:
    """What planned forwards hold now that have not gone backward."""
    return sum(held.nbytes for held in _open.values())


def open_count() -> int:
    """How many planned forwards have not gone backward."""
    return len(_open)


def others_bytes(device: torch.device, *, without: Iterable[Tensor]) -> int:
    """What tensors hold on a device, but for `without` and for what planned forwards hold.

    An allocator counts all of the latter, the CPU's count those that Python has seen.
    """
    if is_accelerator(device):
        return live_bytes(device, without=without) - open_bytes()
    return live_bytes(device, without=without, without_memory={m for held in _open.values() for m in held.memory})


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """What a loop was seen to keep alive beside one forward of a model."""

    forwards: int = 0  # others, which have not gone backward
    keeps_graph: bool = False  # a backward leaves what was saved for another

    @property
    def is_any(self) -> bool:
        return self.forwards > 0 or self.keeps_graph

    def nbytes(self, solution: Solution, *, gradient_bytes: int) -> int:
        """What to leave free beside a plan where the others go by the same one.

        The first backward has all others beside it; a later one finds the gradients of those before.
        """
        held = held_bytes(solution)
        beside = max(self.forwards * held, (self.forwards - 1) * held + gradient_bytes) if self.forwards else 0
        return beside + (_kept_bytes(solution) + gradient_bytes if self.keeps_graph else 0)

    def __str__(self) -> str:
        words = [f"{self.forwards} other forward{'s' if self.forwards > 1 else ''} without a backward yet"]
        words = words if self.forwards else []
        return " and ".join([*words, *(["a graph that is kept (retain_graph=True)"] if self.keeps_graph else [])])


def held_bytes(solution: Solution) -> int:
    """What is live between the forward and the backward of a plan: saved, returned, and of the loss."""
    assert solution.schedule is not None
    assert solution.timeline is not None
    turn = next(op.id for op in solution.problem.graph.ops if op.target == OUTSIDE_NAME)
    at = next(i for i, step in enumerate(solution.schedule.steps) if isinstance(step, Run) and step.op == turn)
    return solution.timeline.bytes_at[at] - solution.timeline.start_bytes


def _kept_bytes(solution: Solution) -> int:
    """By how much the peak rises where the backward frees nothing of what the forward has saved."""
    assert solution.schedule is not None
    assert solution.timeline is not None
    graph, peak = solution.problem.graph, 0
    saved, kept_bytes, is_forward = set[int](), 0, True
    for event in walk(graph, solution.schedule):
        peak = max(peak, event.during_bytes + kept_bytes)
        if is_forward:
            saved = (saved | set(event.made)) - set(event.freed)
            is_forward = not (isinstance(event, Ran) and event.op.target == OUTSIDE_NAME)
        else:
            kept_bytes += sum(graph.storages[s].nbytes for s in saved.intersection(event.freed))
            saved -= set(event.freed)
    return peak - solution.timeline.peak_bytes


def solve_beside(
    problem: Problem, plan: Callable[[Problem], Solution], beside_bytes: Callable[[Solution], int], *, said: str
) -> Solution:
    """A plan that leaves as much of the budget free as is needed beside it, which hangs on what it saves itself.

    The less a plan may take the less it saves, so that a smaller budget is looked for by halves. OverBudget where a
    plan fits alone and none with the others, who are `said` to be there; where none fits alone, that is returned.
    """
    found = plan(problem)
    if _spare_bytes(problem, found, beside_bytes) >= 0:
        return found
    best, least = None, found
    low, high = floor(problem.graph).nbytes, problem.budget_bytes
    shorter = problem.limited(problem.time_limit_s / TRIES)
    for _ in range(TRIES):
        middle = (low + high) // 2
        found = plan(_within(shorter, middle))
        if found.status is not Status.FITS:
            low = middle
        elif _spare_bytes(problem, found, beside_bytes) >= 0:
            best, low = found, middle
        else:
            least, high = found, middle
    if best is None:
        raise _too_much(problem, least, said, beside_bytes(least))
    return best


def _too_much(problem: Problem, least: Solution, said: str, beside_bytes: int) -> OverBudget:
    assert least.timeline is not None
    peak = least.timeline.peak_bytes
    others = said or "forwards of other planned models without a backward yet"
    return OverBudget(
        f"{least.strategy}: a forward and its backward fit {human_bytes(problem.budget_bytes)}, but not with what the "
        f"loop keeps beside them: {others}. Of the plans that were tried, the one that needs least takes "
        f"{human_bytes(peak)} and leaves {human_bytes(beside_bytes)} to the others. What would help: running the step "
        "again, if those were planned before this was known; going backward after each forward; a smaller batch; or "
        f"{human_bytes(peak + beside_bytes - problem.budget_bytes)} more"
    )


def _within(problem: Problem, nbytes: int) -> Problem:
    reserved = None if problem.most_reserved_bytes is None else nbytes
    return replace(problem, budget_bytes=nbytes, most_reserved_bytes=reserved)


def _spare_bytes(problem: Problem, found: Solution, beside_bytes: Callable[[Solution], int]) -> int:
    if found.status is not Status.FITS or found.timeline is None:
        return 0  # nothing is better with less
    return problem.budget_bytes - found.timeline.peak_bytes - beside_bytes(found)
