"""`ilp`: the optimum of "keep, or recompute once", with a proven lower bound.

A mixed-integer program with few memory rows (`strategies.ilp_model`) is solved; its keep set is checked by the
exact simulator; where that finds too many bytes, the program gets a memory row there and is solved again. What it finds
is polished by local search, and returned unless a seed (`mutwo`, `sqrtn`) is better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

import strategies
from planner.errors import NoPlan
from planner.incremental import Incremental
from planner.ir import Graph, Phase
from planner.plan import NEVER_STAGE, BoundClass, Plan, candidates, temporaries
from planner.solve import Problem
from strategies.ilp_model import SparseModel, StagedProgram, unavoidable_bytes
from strategies.ilp_polish import Polish
from strategies.ilp_reduce import Reduction, reduce
from strategies.ilp_solvers import Answer, Outcome, SolverError, SolverName, solve_model

SEEDS = ("mutwo", "sqrtn")
WINDOWS = 8
MOMENTS_A_ROUND = 8
ROUNDS = 24
FEW = 40  # blocks, up to which sets that do not fit are excluded one by one
EVALUATIONS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ilp:
    """`gap` is the proven relative gap at which it stops; `seeds=false` shows what the program finds alone."""

    name: ClassVar[str] = "ilp"
    solver: SolverName = SolverName.ORTOOLS
    gap: float = 0.005
    seeds: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise ValueError(f"gap={self.gap}: it is a fraction, such as 0.005")

    def plan(self, problem: Problem) -> Plan:
        return Search(problem, self).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, what it comes to, and who found it."""

    plan: Plan
    peak_bytes: int
    recompute_us: float
    who: str


class Search:
    """One call of `Ilp.plan`."""

    def __init__(self, problem: Problem, options: Ilp, *, work: Work | None = None) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.options = options
        self.deadline = time.perf_counter() + problem.time_limit_s
        self.work = work if work is not None else Work(problem)
        self.best: Found | None = None  # the cheapest that fits
        self.smallest: Found | None = None  # the one with the smallest peak
        self.alone: Found | None = None  # the cheapest that fits without seeds
        self.bound_us = 0.0
        self.impossible = False
        self.cut_off = False
        self.failure = ""

    def run(self) -> Plan:
        if self.problem.unplanned.peak_bytes <= self.problem.budget_bytes:
            return Plan(lower_bound_us=0.0, bound_class=BoundClass.ANY_SCHEDULE, note="ilp: keeping everything fits")
        if self.options.seeds:
            self._try_seeds()
        try:
            self._optimise()
        except SolverError as error:
            self.failure = str(error)
        if self.best is None:
            self._shrink()
        return self._answer()

    # -- candidates -------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _try_seeds(self) -> None:
        for name in SEEDS:
            plan = strategies.make(name).plan(self.problem)
            timeline = self.problem.timeline(plan)
            self._offer(Found(plan=plan, peak_bytes=timeline.peak_bytes, recompute_us=timeline.recompute_us, who=name))

    def _offer(self, found: Found) -> None:
        if self.smallest is None or found.peak_bytes < self.smallest.peak_bytes:
            self.smallest = found
        if found.peak_bytes > self.problem.budget_bytes:
            return
        if self.best is None or found.recompute_us < self.best.recompute_us:
            self.best = found
        if found.who not in SEEDS and (self.alone is None or found.recompute_us < self.alone.recompute_us):
            self.alone = found

    def _offer_state(self, state: Incremental, who: str) -> None:
        us = state.recompute_us
        fits = state.peak()[0] <= self.problem.budget_bytes
        if fits and self.best is not None and us >= self.best.recompute_us:
            if self.alone is None or us < self.alone.recompute_us:
                self.alone = Found(plan=state.plan(), peak_bytes=state.peak()[0], recompute_us=us, who=who)
            return
        if not fits and self.smallest is not None and state.peak()[0] >= self.smallest.peak_bytes:
            return
        self._offer(Found(plan=state.plan(), peak_bytes=state.peak()[0], recompute_us=us, who=who))

    def _proven(self) -> bool:
        """Whether the best plan is within the gap asked for."""
        if self.best is None:
            return self.impossible
        return self.best.recompute_us - self.bound_us <= self.options.gap * self.best.recompute_us + 1e-9

    # -- the program ------------------------------------------------------------------------------------------

    def _optimise(self) -> None:
        budget = target = self.problem.budget_bytes
        excluded: list[frozenset[int]] = []
        for _ in range(ROUNDS):
            if self._proven() or self._left_s() <= 0:
                break
            program = self.work.program()
            answer = self._solve(program.at(target, excluded))
            if target == budget and (not excluded or self.work.reduction.whole):
                self.bound_us = max(self.bound_us, answer.bound)
                self.impossible |= answer.outcome is Outcome.INFEASIBLE and self.best is None
            if answer.point is None:
                break
            kept = frozenset(program.kept(answer.point))
            state = self.work.state(kept)
            self._offer_state(state, "MILP")
            over = state.stage_bytes() - budget
            if self._proven() or (over.max() <= 0 and target == budget):
                break
            if self._count_there(state, over):
                target = budget
            elif len(program.keep) <= FEW:
                excluded.append(kept)
            else:
                target -= max(int(over.max()), budget // 10000)
            if over.max() <= self.work.step_bytes // 50 or len(program.keep) <= FEW:
                self._polish(state, "polish")
        self.cut_off |= self._left_s() <= 0 and not self._proven()

    def _solve(self, model: SparseModel) -> Answer:
        # A little under the gap asked for, so that a plan that costs what the program says is within it.
        answer = solve_model(model, self.options.solver, time_limit_s=self._left_s(), gap=0.9 * self.options.gap)
        self.cut_off |= answer.outcome is Outcome.CUT_OFF
        return answer

    def _count_there(self, state: Incremental, over: npt.NDArray[np.int64]) -> bool:
        """Count memory where the exact simulator finds too much; False if it is all counted already."""
        grown = False
        for j in _worst(over, MOMENTS_A_ROUND):
            q = state.busiest_run(j)
            if q == j and j not in self.work.moments:
                self.work.moments.add(j)
                grown = True
            elif q != j and (j, q) not in self.work.inner and q in self.work.reduction.root:
                self.work.inner.add((j, q))
                grown = True
        return grown

    def _polish(self, state: Incremental, who: str) -> None:
        polish = Polish(
            state, self.work.movable, self.problem.budget_bytes, evaluations=EVALUATIONS, deadline=self.deadline
        )
        polish.run()
        self.cut_off |= polish.cut_off
        self._offer_state(state, who)

    def _shrink(self) -> None:
        """Nothing fits: look for the smallest peak there is."""
        state = self.work.state(())
        self._offer_state(state, "dropping everything")
        self._polish(state, "polish")

    # -- the answer -------------------------------------------------------------------------------------------

    def _answer(self) -> Plan:
        found = self.best if self.best is not None else self.smallest
        if found is None:
            raise NoPlan(self.failure or f"ilp: no plan within {self.problem.time_limit_s:.0f} s: raise the time limit")
        bound = self.bound_us if math.isfinite(self.bound_us) else 0.0
        return replace(
            found.plan,
            lower_bound_us=max(0.0, min(bound, found.recompute_us)),
            bound_class=BoundClass.RECOMPUTE_ONCE,
            cut_off=self.cut_off,
            note=self._note(found),
        )

    def _note(self, found: Found) -> str:
        words = [f"ilp: {found.who} won"]
        return "; ".join(words)


class Work:
    """What does not depend on the budget: the reduction, the moments so far and the program built on them."""

    def __init__(self, problem: Problem) -> None:
        self.graph = problem.graph
        self.in_place = problem.in_place
        self.step_bytes = problem.unplanned.above_start_bytes
        self.moments: set[int] = set()  # where the program counts memory: at ops, and
        self.inner: set[tuple[int, int]] = set()  # during the rerun of an op placed before another
        self._program: tuple[int, StagedProgram] | None = None

    @cached_property
    def reduction(self) -> Reduction:
        return reduce(self.graph, step_bytes=self.step_bytes)

    @cached_property
    def movable(self) -> list[int]:
        """What local search flips: in a small graph also what the program leaves alone."""
        free = sorted((*candidates(self.graph), *temporaries(self.graph)))
        return free if len(free) <= FEW else sorted(self.reduction.blocks)

    def program(self) -> StagedProgram:
        """The program for the moments known by now."""
        if not self.moments:
            self.moments.update(first_moments(self.reduction, self.in_place))
        size = len(self.moments) + len(self.inner)  # both only ever grow
        if self._program is None or self._program[0] != size:
            self._program = size, StagedProgram(self.reduction, self.moments, self.inner)
        return self._program[1]

    def state(self, kept: Iterable[int]) -> Incremental:
        """The exact state in which `kept` of the blocks are held."""
        dropped = set(self.reduction.dropped(set(kept)))
        state = state_of(self.graph, dropped, in_place=self.in_place)
        for storage in temporaries(self.graph):
            idle = all(state.rerun_stage(reader) == NEVER_STAGE for reader in self.graph.readers[storage])
            if idle and not state.is_dropped(storage):
                state.drop(storage)  # nothing is recomputed from it
        return state


def state_of(graph: Graph, dropped: set[int], *, in_place: bool) -> Incremental:
    """The exact state of any set of dropped candidates and temporaries."""
    return Incremental(
        graph,
        [s for s in candidates(graph) if s in dropped],
        kept=[s for s in temporaries(graph) if s not in dropped],
        in_place=in_place,
    )


def first_moments(reduction: Reduction, in_place: bool) -> set[int]:
    """Where memory is counted at first: the turns, where the unplanned step peaks, and the worst of equal windows."""
    graph = reduction.graph
    turns = [
        op.id - 1
        for op in graph.ops
        if op.id > 0 and op.phase is Phase.BACKWARD and graph.ops[op.id - 1].phase is not Phase.BACKWARD
    ]
    moments = {*turns, Incremental(graph, in_place=in_place).peak()[1]}
    if not turns:
        return moments
    least = unavoidable_bytes(reduction)
    edges = np.linspace(turns[0] + 1, len(graph.ops), WINDOWS * len(turns) + 1).astype(int)
    for begin, end in pairwise(edges.tolist()):
        if end > begin:
            moments.add(int(begin + least[begin:end].argmax()))
    return moments


def _worst(over: npt.NDArray[np.int64], count: int) -> list[int]:
    """Up to `count` positions over the budget, the worst first, each the worst of its neighbourhood."""
    apart = max(1, len(over) // 64)
    left = over.astype(np.int64).copy()
    found: list[int] = []
    while len(found) < count and left.max() > 0:
        j = int(left.argmax())
        found.append(j)
        left[max(0, j - apart) : j + apart + 1] = 0
    return found
