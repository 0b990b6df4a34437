"""Large neighbourhoods of a plan: what a stretch of the step keeps and moves is decided anew, all else stays.

The whole program is too large to be solved to whole numbers in seconds, and the points near its relaxation may all be
over the budget. With most of it fixed to a plan that fits, what is left is small, and the plan itself is a point of it.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.ir import Graph
from strategies.ilp.linear import SparseModel
from strategies.ilp.moving import MovingProgram
from strategies.mutwo.swapping import Choice

WINDOW = 80  # storages that are decided anew at a time


def windows(graph: Graph, storages: Collection[int]) -> list[frozenset[int]]:
    """Storages made one after another, the first ones first: they idle longest. Each window overlaps the next."""
    order = sorted(storages, key=lambda s: (graph.maker[s] or 0, s))
    begins = range(0, max(1, len(order) - WINDOW // 2), WINDOW // 2)
    return [frozenset(order[begin : begin + WINDOW]) for begin in begins]


def fixed_outside(program: MovingProgram, model: SparseModel, choice: Choice, window: Collection[int]) -> SparseModel:
    """The program where everything outside of the window is kept, dropped or moved as it is in `choice`."""
    state, moved = choice.state, choice.placed.storages
    kept = {v: float(not state.is_dropped(s)) for s, v in program.keep.items() if s not in window}
    return model.fixed(kept | {v: float(s in moved) for s, v in program.moved.items() if s not in window})
