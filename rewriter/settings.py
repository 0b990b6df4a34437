"""What every door is asked for in the same words: read and checked before anything is captured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

import strategies
from planner.errors import FileFormatError, PlannerError
from planner.host_link import HostLink
from planner.solve import Strategy
from rewriter.budgets import check_budget
from rewriter.cache import Cache
from rewriter.moving import HostAccess
from rewriter.reserving import Reserve, read_reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a plan is asked for, of a step or of a model."""

    budget: str | int
    strategy: Strategy
    label: str
    time_limit_s: float
    plan_file: str | Path | None
    in_place: bool
    most_shapes: int | None
    most_forms_bytes: int
    show_progress: bool
    cache: Cache
    access: HostAccess | None = None  # what a plan may move tensors to
    reserve: Reserve = Reserve.NOTHING


S = TypeVar("S", bound=PlanSettings)


def read_settings(
    kind: type[S],
    device: torch.device,
    *,
    budget: str | int,
    strategy: str | Strategy,
    time_limit_s: float,
    most_shapes: int | None,
    plan: str | Path | None = None,
    saved_by: str = "",
    cache_dir: str | Path | None = None,
    host_link: str | float | HostLink | None = None,
    offload_dir: str | Path | None = None,
    host_budget: str | int | None = None,
    reserve: str | None = None,
    **own: Any,
) -> S:
    """The settings of one door, `own` being its own; an error in one sentence for what no door can use.

    `saved_by` is how the door's user writes a plan to a file.
    """
    chosen = strategies.make(strategy) if isinstance(strategy, str) else strategy
    check_budget(budget, device)
    _check_numbers(time_limit_s, most_shapes)
    if plan is not None and not Path(plan).exists():
        raise FileFormatError(f"{plan}: there is no such plan; `{saved_by}({str(plan)!r})` writes one")
    reserved = read_reserve(reserve, device)
    return kind(
        budget=budget,
        strategy=chosen,
        label=strategy if isinstance(strategy, str) else strategy.name,
        time_limit_s=time_limit_s,
        plan_file=plan,
        most_shapes=most_shapes,
        cache=Cache.at(cache_dir),
        access=HostAccess.of(host_link, offload_dir, host_budget, device),
        reserve=reserved,
        **own,
    )


def _check_numbers(time_limit_s: float, most_shapes: int | None) -> None:
    if not (time_limit_s > 0 and math.isfinite(time_limit_s)):
        raise PlannerError(f"time_limit_s={time_limit_s}: give the seconds that a strategy may take, such as 10")
    if most_shapes is not None and most_shapes < 1:
        raise PlannerError(f"most_shapes={most_shapes}: the one in use is always kept, so at least 1")
