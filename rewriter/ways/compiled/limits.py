"""A plan for a graph of Dynamo's under what the budget leaves for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.ir import Graph, Role
from planner.solve import Problem, Solution, Status
from rewriter.budgets import is_share, margin_of_a_plan_bytes, over_budget
from rewriter.pipeline import budget_bytes
from rewriter.ways.common import ModelSettings
from rewriter.ways.company import Company, open_bytes, others_bytes, solve_beside
from rewriter.ways.optimizer_steps import missing_state_bytes

ALONE = Company()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a graph may take of memory."""

    limit_bytes: int
    margin_bytes: int
    elsewhere_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.limit_bytes - self.margin_bytes


def elsewhere_bytes(settings: ModelSettings, device: torch.device, own: Sequence[Tensor]) -> int:
    """What of a budget in bytes is taken by tensors other than `own`, state that an optimizer will make too."""
    if not settings.in_bytes:
        return 0
    to_come = 0 if settings.optimizer is None else missing_state_bytes(settings.optimizer)
    return others_bytes(device, without=own) + to_come


def room_for(
    graph: Graph, settings: ModelSettings, device: torch.device, *, elsewhere: int, added_bytes: int | None = None
) -> Room:
    """The budget as bytes for `graph`, beside `elsewhere` bytes of other tensors.

    A share is one of `added_bytes`, or of what the graph adds by itself.
    """
    peak = None if added_bytes is None else graph.start_bytes + added_bytes
    limit = budget_bytes(graph, settings.budget, device, in_place=settings.in_place, peak_bytes=peak) - elsewhere
    margin = margin_of_a_plan_bytes(graph, limit, in_place=settings.in_place)
    return Room(limit_bytes=limit, margin_bytes=margin, elsewhere_bytes=elsewhere)


def beside_bytes(solution: Solution, settings: ModelSettings, company: Company) -> int:
    """What of a budget has to be left to other forwards beside a plan; a share is of one forward and its backward."""
    if is_share(settings.budget):
        return 0
    return max(open_bytes(), company.nbytes(solution, gradient_bytes=_gradient_bytes(solution.problem.graph)))


def _gradient_bytes(graph: Graph) -> int:
    """What the gradients of a plan take."""
    return sum(storage.nbytes for storage in graph.storages if storage.role is Role.GRADIENT)


def solved(graph: Graph, settings: ModelSettings, room: Room, company: Company = ALONE) -> Solution:
    """A plan of `graph` that fits beside `company`; OverBudget names the floor."""
    problem = Problem(
        graph=graph,
        budget_bytes=room.usable_bytes,
        time_limit_s=settings.time_limit_s,
        in_place=settings.in_place,
    )

    def planned(problem: Problem) -> Solution:
        return settings.cache.solved(problem, settings.strategy, label=settings.label)

    solution = solve_beside(problem, planned, lambda found: beside_bytes(found, settings, company), said=str(company))
    if solution.status is not Status.FITS:
        raise over_budget(solution, room.limit_bytes, room.margin_bytes, elsewhere_bytes=room.elsewhere_bytes)
    return solution
