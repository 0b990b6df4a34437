"""Moves to the host: what a user allows of them, and the calls of a replayed graph that they are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from planner.errors import BudgetError, LinkError
from planner.host_link import HostLink, parse_link
from planner.ir import Graph
from planner.schedule import COPY_IN, COPY_OUT, Launch, Schedule, Wait
from planner.solve import Problem
from planner.units import is_reserved, parse_budget, read_budget
from profiler.measuring.hosts import Host, Move, host_for
from profiler.measuring.link_speed import measured_link

MEASURE = "measure"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccess:
    """A host that plans may use: how fast the way to it is, and how much it may hold."""

    host: Host
    link: HostLink
    budget_bytes: int | None = None

    def offered_in(self, problem: Problem, *, at_a_time: int = 1) -> Problem:
        """The problem for plans that may move tensors there, so many of them alive at a time."""
        budget_bytes = None if self.budget_bytes is None else self.budget_bytes // at_a_time
        return replace(problem, host_link=self.link, host_budget_bytes=budget_bytes)

    @staticmethod
    def of(
        host_link: str | float | HostLink | None,
        offload_dir: str | Path | None,
        host_budget: str | int | None,
        device: torch.device,
    ) -> HostAccess | None:
        """What a user asked for, checked before anything is captured; None without a link."""
        if host_link is None:
            given = [n for n, v in (("offload_dir", offload_dir), ("host_budget", host_budget)) if v is not None]
            if given:
                raise LinkError(f"{given[0]} without host_link: say how fast the way there is, or 'measure'")
            return None
        link = None if host_link == MEASURE else _link(host_link)
        budget_bytes = None if host_budget is None else _bytes(host_budget)
        host = host_for(device, offload_dir)
        # By a host of its own: what it takes to measure is given back.
        link = link or measured_link(host_for(device, offload_dir), device)
        host.budget_bytes = budget_bytes
        return HostAccess(host=host, link=link, budget_bytes=budget_bytes)


def _link(given: str | float | HostLink) -> HostLink:
    return given if isinstance(given, HostLink) else parse_link(given)


def _bytes(budget: str | int) -> int:
    if budget == 0:
        return 0
    _, unit = read_budget(budget)
    if unit == "%" or is_reserved(budget):
        raise BudgetError(f"host_budget={budget!r:.60}: give bytes, such as '8GiB'; a share of what is not known here")
    return parse_budget(budget, start_bytes=0, peak_bytes=0)


class Send:
    """Begins a copy to the host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.__name__ = self.__qualname__ = "send_to_host"

    def __call__(self, tensor: Tensor) -> Move:
        return Move(self._host, tensor)


def wait_until_away(move: Move, *tensors: Tensor) -> Move:
    """The tensors of a storage, which nothing else holds from here on."""
    move.away(tensors)
    return move


def fetch_from_host(move: Move) -> Move:
    """Begins the copy back."""
    move.fetch()
    return move


def wait_until_back(move: Move) -> tuple[Tensor, ...]:
    """The tensors that went, in the order in which they did."""
    return move.back()


def buffer_sizes(graph: Graph, schedule: Schedule) -> list[int]:
    """The sizes of the buffers that a schedule has in use at a time, those of one size used again."""
    used, most = Counter[int](), Counter[int]()
    for step in schedule.steps:
        match step:
            case Launch(lane=lane, storage=storage) if lane == COPY_OUT:
                used[graph.storages[storage].nbytes] += 1
                most |= used
            case Wait(lane=lane, storage=storage) if lane == COPY_IN:
                used[graph.storages[storage].nbytes] -= 1
            case _:
                pass
    return sorted(most.elements(), reverse=True)


def reserve(host: Host, graph: Graph, schedule: Schedule) -> None:
    """Make room for all that a schedule moves, before anything runs; HostError if there is none."""
    host.reserve(buffer_sizes(graph, schedule))
