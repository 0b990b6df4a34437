"""What a budget leaves for a plan, and what is said where no plan meets it."""

from __future__ import annotations

import math
from typing import Any

import torch

from planner.analysis import Floor, floor
from planner.culprits import idle_at_peak, too_little_room, where_the_peak_is
from planner.errors import BudgetError, PlannerError
from planner.ir import Graph, Role
from planner.simulator import unplanned
from planner.solve import Solution
from planner.units import human_bytes, is_reserved, read_budget
from profiler.backend import backend_for, is_accelerator
from profiler.measuring.memory import allocator_of
from profiler.tracing.joint import OUTSIDE_NAME

AUTO = "auto"

# What the prediction was ever seen to be off by, of what a step adds to memory: kept free below the budget.
MARGIN = 0.005

# What of a GPU's whole memory is left out of budget="auto", for what no simulation of its allocator knows: libraries
# that take memory when they are first used, other streams.
UNFORESEEN = 0.01


class OverBudget(PlannerError):  # noqa: N818 - an answer, not a fault
    """No plan meets the budget; says the smallest peak found, the floor, and what would help."""


def check_budget(budget: str | int, device: torch.device, api: Any = None) -> None:
    """BudgetError for what is no budget, whatever the step: told before anything is captured.

    `api` is a stand-in of torch.cuda in tests.
    """
    if budget != AUTO:
        read_budget(budget)
    elif not is_accelerator(device):
        raise BudgetError(f"budget 'auto' asks a GPU what is free, but the model is on {device}: say bytes or a share")
    if bounds_reserved(budget) and not is_accelerator(device):
        raise BudgetError(
            f"budget {budget!r:.60} is for the allocator of a GPU, but the model is on {device}, where nothing is held "
            "that does not live: say bytes or a share"
        )
    if bounds_reserved(budget) and allocator_of(device, api) is None:
        raise BudgetError(
            f"budget {budget!r:.60}: the allocator in use on {device} is none that can be simulated (PyTorch's own "
            "caching one): say bytes of live tensors or a share, and leave room between its blocks"
        )


def bounds_reserved(budget: str | int) -> bool:
    """Whether a budget is for all that a GPU's allocator holds: what is free on a card has to hold that."""
    return budget == AUTO or is_reserved(budget)


def auto_budget(graph: Graph, device: torch.device, api: Any = None) -> int:
    """What may be reserved of a GPU for the step: what is live before it and what is free, less what is unforeseen.

    `api` is a stand-in of torch.cuda in tests.
    """
    check_budget(AUTO, device, api)
    backend = backend_for(device, api)
    return int(graph.start_bytes + backend.available_bytes() - UNFORESEEN * backend.total_bytes())


def is_share(budget: str | int) -> bool:
    """Whether a budget is a share of what the unplanned step adds."""
    return isinstance(budget, str) and budget.rstrip().endswith("%")


def margin_bytes(graph: Graph, limit_bytes: int) -> int:
    """What of a budget is kept free for the error of the prediction."""
    return int(MARGIN * max(0, limit_bytes - graph.start_bytes))


def margin_of_a_plan_bytes(graph: Graph, limit_bytes: int, *, in_place: bool) -> int:
    """What is kept free for the error of the prediction: nothing where all fits as it is, and no plan is needed."""
    fits_as_it_is = unplanned(graph, in_place=in_place).peak_bytes <= limit_bytes
    return 0 if fits_as_it_is else margin_bytes(graph, limit_bytes)


def over_budget(
    solution: Solution, limit_bytes: int, margin: int, *, elsewhere_bytes: int = 0, beyond_bytes: int = 0
) -> OverBudget:
    """The smallest peak found, the floor that no plan can go under with what it is made of, and what would help.

    `elsewhere_bytes` of the budget are taken by tensors that are no part of what was planned; `limit_bytes` are left.
    By `beyond_bytes` plans before this one were measured above their predictions.
    """
    graph, found = solution.problem.graph, solution.timeline
    least = f"the smallest peak found is {human_bytes(found.peak_bytes)}" if found else solution.reason
    lowest = floor(graph, moving=solution.problem.host_link is not None)
    needed = found.peak_bytes if found else lowest.nbytes
    if solution.problem.most_reserved_bytes is not None and solution.held is not None:
        needed = solution.held.reserved_bytes
        least += f", for which the GPU's allocator holds {human_bytes(needed)} by simulation"
    if beyond_bytes:
        needed += beyond_bytes
        least += f", and plans before it were measured {human_bytes(beyond_bytes)} above their predictions"
    enough = elsewhere_bytes + graph.start_bytes + math.ceil((needed - graph.start_bytes) / (1 - MARGIN))
    beside = f" beside {human_bytes(elsewhere_bytes)} of tensors outside of the plan" if elsewhere_bytes else ""
    helping = _help(graph, lowest, limit_bytes, whole_step=not elsewhere_bytes)
    return OverBudget(
        f"{solution.strategy}: no plan fits {human_bytes(max(0, limit_bytes))}{beside} ({human_bytes(margin)} of it "
        f"kept free): {least}{_where(solution)}. No plan at all can go under {lowest}. What would help: {helping}, or "
        f"a budget of at least {enough} bytes ({human_bytes(enough)})"
    )


def _where(solution: Solution) -> str:
    """Where the peak lies of a plan that could have moved tensors to the host, and what moving cannot take away."""
    problem, schedule, timeline = solution.problem, solution.schedule, solution.timeline
    if problem.host_link is None or schedule is None or timeline is None:
        return ""
    where = where_the_peak_is(problem.graph, schedule, timeline)
    idle = idle_at_peak(problem.graph, schedule, timeline)
    room = too_little_room(problem.graph, idle, problem.host_budget_bytes)
    return f", {where}: moving tensors to the host does not take that away{'; beside it ' if room else ''}{room}"


def _help(graph: Graph, lowest: Floor, limit_bytes: int, *, whole_step: bool) -> str:
    words = ["a smaller batch"]
    if whole_step and any(graph.storages[graph.values[v].storage].role is Role.GRADIENT for v in graph.outputs):
        of_a_model = any(op.target == OUTSIDE_NAME for op in graph.ops)
        words.append(
            f"{'planning the whole step by checkpoint() with ' if of_a_model else ''}free_gradients=True with "
            "early_updates=True, which take gradients out of the peak"
        )
    text = "; ".join(words)
    if lowest.nbytes < limit_bytes:
        text = f"another strategy or a longer time limit may get below it; {text}"
    return text
