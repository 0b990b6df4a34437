"""What a budget leaves for a plan, and what is said where no plan meets it."""

from __future__ import annotations

import math
from typing import Any

import torch

from planner.analysis import Floor, floor
from planner.errors import BudgetError, PlannerError
from planner.ir import Graph, Role
from planner.solve import Solution
from planner.units import human_bytes, read_budget
from profiler.measuring.memory import available_bytes

AUTO = "auto"

# What the prediction was ever seen to be off by, of what a step adds to memory: kept free below the budget.
MARGIN = 0.005

# What a GPU's caching allocator may lose between its blocks, of the whole memory: left out of budget="auto".
FRAGMENTATION = 0.03


class OverBudget(PlannerError):  # noqa: N818 - an answer, not a fault
    """No plan meets the budget; says the smallest peak found, the floor, and what would help."""


def check_budget(budget: str | int, device: torch.device) -> None:
    """BudgetError for what is no budget, whatever the step: told before anything is captured."""
    if budget != AUTO:
        read_budget(budget)
    elif device.type != "cuda":
        raise BudgetError(f"budget 'auto' asks a GPU what is free, but the model is on {device}: say bytes or a share")


def auto_budget(graph: Graph, device: torch.device, api: Any) -> int:
    """What the step may use of a GPU: what is live before it and what is free, less a share for fragmentation.

    `api` is torch.cuda, or a stand-in of it in tests.
    """
    check_budget(AUTO, device)
    _, total = api.mem_get_info(device)
    return int(graph.start_bytes + available_bytes(device, api) - FRAGMENTATION * total)


def margin_bytes(graph: Graph, limit_bytes: int) -> int:
    """What of a budget is kept free for the error of the prediction."""
    return int(MARGIN * max(0, limit_bytes - graph.start_bytes))


def over_budget(solution: Solution, limit_bytes: int, margin: int, *, elsewhere_bytes: int = 0) -> OverBudget:
    """The smallest peak found, the floor that no plan can go under with what it is made of, and what would help.

    `elsewhere_bytes` of the budget are taken by tensors that are no part of what was planned; `limit_bytes` are left.
    """
    graph, found = solution.problem.graph, solution.timeline
    least = f"the smallest peak found is {human_bytes(found.peak_bytes)}" if found else solution.reason
    lowest = floor(graph)
    needed = found.peak_bytes if found else lowest.nbytes
    enough = elsewhere_bytes + graph.start_bytes + math.ceil((needed - graph.start_bytes) / (1 - MARGIN))
    beside = f" beside {human_bytes(elsewhere_bytes)} of tensors outside of the model" if elsewhere_bytes else ""
    helping = _help(graph, lowest, limit_bytes, whole_step=not elsewhere_bytes)
    return OverBudget(
        f"{solution.strategy}: no plan fits {human_bytes(max(0, limit_bytes))}{beside} ({human_bytes(margin)} of it "
        f"kept free): {least}. No plan at all can go under {lowest}. What would help: {helping}, or a budget of at "
        f"least {enough} bytes ({human_bytes(enough)})"
    )


def _help(graph: Graph, lowest: Floor, limit_bytes: int, *, whole_step: bool) -> str:
    words = ["a smaller batch"]
    if whole_step and any(graph.storages[graph.values[v].storage].role is Role.GRADIENT for v in graph.outputs):
        words.append("free_gradients=True with early_updates=True, which take gradients out of the peak")
    text = "; ".join(words)
    if lowest.nbytes < limit_bytes:
        text = f"another strategy or a longer time limit may get below it; {text}"
    return text
