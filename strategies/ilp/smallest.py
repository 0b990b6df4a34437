"""The smallest peak that recomputing once can reach, whatever it costs or within a time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from planner.incremental import Incremental
from strategies.ilp.shared_work import Work
from strategies.ilp.solvers import Outcome, SolverName, solve_model

ROUNDS = 12


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The state with the smallest peak found (None without any), and the peak below which there is none."""

    state: Incremental | None
    floor_bytes: int
    cut_off: bool


def smallest_peak(
    work: Work, solver: SolverName, *, deadline: float, gap: float = 0.002, max_us: float | None = None
) -> Smallest:
    """Minimise the exact peak over plans that recompute once, within `max_us` of recompute time if given.

    SolverError if the solver is missing or fails.
    """
    best: Incremental | None = None
    floor, cut_off = work.graph.start_bytes, False
    for _ in range(ROUNDS):
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            cut_off = True
            break
        program = work.program()
        model = program.smallest(work.peak_bytes, max_us=max_us)
        answer = solve_model(model, solver, time_limit_s=left_s, gap=gap)
        cut_off |= answer.outcome is Outcome.CUT_OFF
        floor = max(floor, int(answer.bound * work.peak_bytes)) if answer.bound > 0 else floor
        if answer.point is None:
            break
        state = work.state(program.kept(answer.point))
        within = max_us is None or state.recompute_us <= max_us * (1 + 1e-9)
        if within and (best is None or state.peak()[0] < best.peak()[0]):
            best = state
        counted = int(answer.objective * work.peak_bytes)
        if best is not None and best.peak()[0] <= floor * (1 + gap):
            break
        if not work.places.count_there(state, state.stage_bytes() - counted - 1):
            break
    return Smallest(state=best, floor_bytes=floor, cut_off=cut_off)
