"""Moves to the host put to the test: what comes back is what went, also where every copy is late.

A copy that nobody waits for is right by luck as long as copies are fast. So each is held up where it runs, on its
stream or in its thread, and every bit is compared again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import strategies
from planner.host_link import HostLink
from planner.solve import Problem, Solution, solve
from planner.units import human_bytes
from profiler.backend import backend_for
from profiler.measuring.hosts import BeforeCopy, host_for
from profiler.measuring.link_speed import measured_link
from profiler.workload import Workload
from rewriter.moving import HostAccess
from rewriter.pipeline import ReadyStep, prepare
from rewriter.proof import Verification

LATE_S = 0.002  # so long each copy is held up
ANY_PRICE = HostLink.of(1e6, latency_us=0.0)  # a link over which everything is worth moving


def moved_step(
    make: Callable[[], Workload], device: torch.device, *, steps: int
) -> list[tuple[str, Verification, str]]:
    """(how copies went, what was seen, what was moved) of one step with all moves that there can be."""
    with tempfile.TemporaryDirectory() as folder:
        ready = prepare(make(), ["100%"], access=_access(device, folder, None))
        problem = Problem(graph=ready.graph, budget_bytes=1, host_link=ANY_PRICE)
        solution = solve(problem, strategies.make("offload_only"))
        backend = backend_for(device)
        assert ready.access is not None
        moved = f"{_moved(solution)} at {measured_link(ready.access.host, device)}"
        ways: Sequence[tuple[str, BeforeCopy]] = (
            ("copies as they come", None),
            ("every copy late", lambda _: backend.idle(LATE_S)),
        )
        return [(how, _seen(ready, solution, _access(device, folder, before), steps), moved) for how, before in ways]


def _access(device: torch.device, folder: str, before: BeforeCopy) -> HostAccess:
    return HostAccess(host=host_for(device, folder, before_copy=before), link=ANY_PRICE)


def _seen(ready: ReadyStep, solution: Solution, access: HostAccess, steps: int) -> Verification:
    ready = replace(ready, access=access)
    assert solution.schedule is not None
    return ready.proof(ready.replayed(solution.schedule), solution, ready.workload.batch, steps=steps)


def _moved(solution: Solution) -> str:
    assert solution.timeline is not None
    return f"{len(solution.moved)} tensors, {human_bytes(solution.timeline.moved_bytes)}"
