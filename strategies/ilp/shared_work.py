"""What several solves on one graph share: its reduction, the moments found so far, and exact states."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.analysis import candidates, temporaries
from planner.incremental import Incremental
from planner.ir import Graph, Phase
from planner.plan import NEVER_STAGE, BoundClass, Plan
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem
from planner.units import human_bytes
from strategies.ilp.program import StagedProgram, unavoidable_bytes
from strategies.ilp.reduction import Reduction, reduce

KEEP_ALL = Plan(
    lower_bound_us=0.0,
    bound_class=BoundClass.ANY_SCHEDULE,
    found_by="keeping everything",
    note="ilp: keeping everything fits",
)

WINDOWS = 8
MOMENTS_A_ROUND = 8
FEW = 40  # storages, up to which a graph counts as small

Bytes = npt.NDArray[np.int64]

log = logging.getLogger("recompute_planner")


class Places:
    """Where a program counts memory: at ops, and during the rerun of an op placed before another. They only grow."""

    def __init__(
        self, reduction: Reduction, moments: Iterable[int], inner: Iterable[tuple[int, int]] = (), *, in_place: bool
    ) -> None:
        self.reduction = reduction
        self.in_place = in_place
        self.moments = set(moments)
        self.inner = set(inner)
        self._program: tuple[int, StagedProgram] | None = None

    @property
    def counted(self) -> int:
        """How many there are by now."""
        return len(self.moments) + len(self.inner)

    def program(self) -> StagedProgram:
        """The program for the places known by now."""
        size = self.counted
        if self._program is None or self._program[0] != size:
            self._program = size, StagedProgram(self.reduction, self.moments, self.inner, in_place=self.in_place)
        return self._program[1]

    def count_there(self, state: Incremental, over: Bytes, *, most: int = MOMENTS_A_ROUND) -> bool:
        """Count memory where `over` is worst, in at most so many places; False if it is all counted already."""
        grown = False
        for j in worst(over, most):
            q = state.busiest_run(j)
            if q == j and j not in self.moments:
                self.moments.add(j)
                grown = True
            elif q != j and (j, q) not in self.inner and q in self.reduction.root:
                self.inner.add((j, q))
                grown = True
        return grown


class Work:
    """Its places grow as solves find out where memory must be counted; nothing in it depends on a budget."""

    def __init__(self, problem: Problem) -> None:
        self.graph = problem.graph
        started = time.perf_counter()
        simulate(self.graph, lower(self.graph, Plan(), in_place=problem.in_place))
        self.simulation_s = time.perf_counter() - started
        self.in_place = problem.in_place
        self.peak_bytes = problem.unplanned.peak_bytes
        self.step_bytes = problem.unplanned.above_start_bytes

    @cached_property
    def reduction(self) -> Reduction:
        return reduce(self.graph, step_bytes=self.step_bytes)

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Everything that a plan may drop, in id order."""
        return tuple(sorted((*candidates(self.graph), *temporaries(self.graph))))

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """What local search flips: in a small graph also what the program leaves alone."""
        return self.free if len(self.free) <= FEW else tuple(sorted(self.reduction.blocks))

    @cached_property
    def places(self) -> Places:
        """Where memory is counted by now."""
        first = first_moments(self.reduction, in_place=self.in_place)
        return Places(self.reduction, first, in_place=self.in_place)

    def program(self) -> StagedProgram:
        """The program for the places known by now."""
        return self.places.program()

    def state(self, kept: Iterable[int]) -> Incremental:
        """The exact state in which `kept` of the blocks are held."""
        state = state_of(self.graph, set(self.reduction.dropped(set(kept))), in_place=self.in_place)
        for storage in temporaries(self.graph):
            idle = all(state.rerun_stage(reader) == NEVER_STAGE for reader in self.graph.readers[storage])
            if idle and not state.is_dropped(storage):
                state.drop(storage)  # nothing is recomputed from it
        return state


def state_of(graph: Graph, dropped: Collection[int], *, in_place: bool) -> Incremental:
    """The exact state of any set of dropped candidates and temporaries."""
    return Incremental(
        graph,
        [s for s in candidates(graph) if s in dropped],
        kept=[s for s in temporaries(graph) if s not in dropped],
        in_place=in_place,
    )


def tell_tried(problem: Problem, who: str, *, started: float, peak_bytes: int, extra_us: float) -> None:
    """A line in the log for a candidate: whose it is, and what it comes to."""
    log.debug(
        "ilp tried %s after %.2f s: peak %s of %s, %.2f%% more time",
        who,
        time.perf_counter() - started,
        human_bytes(peak_bytes),
        human_bytes(problem.budget_bytes),
        100 * extra_us / max(problem.graph.time_us, 1e-9),
    )


def first_moments(reduction: Reduction, *, in_place: bool) -> set[int]:
    """Where memory is counted at first: at turns, where the unplanned step peaks, and at the worst of equal windows."""
    graph = reduction.graph
    turns = backward_starts(graph)
    moments = {*turns, Incremental(graph, in_place=in_place).peak()[1]}
    if not turns:
        return moments
    least = unavoidable_bytes(reduction)
    edges = np.linspace(turns[0] + 1, len(graph.ops), WINDOWS * len(turns) + 1).astype(int)
    for begin, end in pairwise(edges.tolist()):
        if end > begin:
            moments.add(int(begin + least[begin:end].argmax()))
    return moments


def backward_starts(graph: Graph) -> list[int]:
    """The last op of every forward that a backward follows; updates of parameters in between interrupt neither."""
    passes = [op for op in graph.ops if op.phase is not Phase.OPTIMIZER]
    return [
        after.id - 1
        for before, after in pairwise(passes)
        if after.phase is Phase.BACKWARD and before.phase is not Phase.BACKWARD
    ]


def worst(over: Bytes, count: int) -> list[int]:
    """Up to `count` positions over zero, the worst first, each the worst of its neighbourhood."""
    apart = max(1, len(over) // 128)
    left = over.copy()
    found: list[int] = []
    while len(found) < count and left.max() > 0:
        j = int(left.argmax())
        found.append(j)
        left[max(0, j - apart) : j + apart + 1] = 0
    return found
