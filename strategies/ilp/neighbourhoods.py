"""Large-neighbourhood search: most decisions stay as the best plan has them, the program decides the rest anew.

A neighbourhood is what the linear relaxation and the plan disagree about, or windows of consecutive blocks. Each is a
small program, solved within a fixed number of nodes and judged exactly; where the judge finds bytes that the program
did not count, the program counts them and is solved again. Nothing here looks at the clock but to stop at a deadline,
so that the same call takes the same steps on a machine that is busy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random

from planner.incremental import Incremental
from strategies.ilp.linear import Floats, SparseModel
from strategies.ilp.polish import WORTH_US, Polish, shed_free
from strategies.ilp.program import StagedProgram
from strategies.ilp.shared_work import Places, Work
from strategies.ilp.solvers import SolverName, solve_model

NODES = 40  # a solve, and fewer where the program is larger than so many variables times rows
LARGE_CELLS = 15_000_000
ATTEMPTS = 3  # at one neighbourhood, with more bytes counted each time
DISPUTED_ATTEMPTS = 8  # where it is what a bound disagrees about: the one most worth the work
PLACES_A_ROUND = 4  # to count in after an attempt: each makes the program larger, and the next attempt slower
EVALUATIONS = 300  # to make fit what is a little over
LEAST_WIDTH, MOST_WIDTH = 24, 54  # blocks in a window
WINDOWS = 6  # that the whole graph has, beside each other
GAP = 0.0025
MOST_SLACK = 0.01  # of the budget
WORTH = 1e-4  # of the time recomputed: what a solve has to gain


class Neighbourhoods:
    """The best state so far, and solves around it."""

    def __init__(
        self,
        work: Work,
        state: Incremental,
        solver: SolverName,
        budget_bytes: int,
        *,
        deadline: float,
        places: Places | None = None,
    ) -> None:
        self.work, self.solver = work, solver
        self.places = places if places is not None else work.places
        self.budget_bytes, self.deadline = budget_bytes, deadline
        self.state = state
        self.slack_bytes = 0  # for what is called small, and so is not counted
        self.blocks = sorted(work.reduction.blocks)
        self._model: tuple[StagedProgram, int, SparseModel] | None = None

    def program(self) -> tuple[StagedProgram, SparseModel]:
        """The program for what is counted by now, under the budget less the slack."""
        program, slack = self.places.program(), self.slack_bytes
        if self._model is None or self._model[0] is not program or self._model[1] != slack:
            self._model = program, slack, program.at(self.budget_bytes - slack)
        return program, self._model[2]

    def around(self, free: set[int], *, attempts: int = ATTEMPTS) -> bool:
        """Decide `free` anew; True if the state became cheaper."""
        for _ in range(attempts):
            if time.perf_counter() > self.deadline:
                return False
            state = self._solved(free)
            if state is None:
                return False
            known = self.counts(state)
            if self._taken(state, free):
                return True
            if known:
                return False
        return False

    def counts(self, state: Incremental) -> bool:
        """Whether the program counts all that `state` has over the budget; from now on it does."""
        over = state.stage_bytes() - self.budget_bytes
        if over.max() <= 0:
            return True
        if self.places.count_there(state, over, most=PLACES_A_ROUND):
            return False
        slack = self.slack_bytes + int(over.max())
        if slack > MOST_SLACK * self.budget_bytes:
            return True
        self.slack_bytes = slack
        return False

    def _solved(self, free: set[int]) -> Incremental | None:
        """The exact state of the program's answer; None where it promises nothing better."""
        program, model = self.program()
        fates = {v: float(not self.state.is_dropped(x)) for x, v in program.keep.items() if x not in free}
        left_s = self.deadline - time.perf_counter()
        better = model.fixed(fates).cheaper_than((1 - WORTH) * self.state.recompute_us)
        nodes = min(NODES, max(1, NODES * LARGE_CELLS // (better.n_variables * better.n_rows)))
        answer = solve_model(better, self.solver, time_limit_s=left_s, gap=GAP, nodes=nodes)
        if answer.point is None:
            return None
        state = self.work.state(program.kept(answer.point))
        # The program counts nothing of what comes back with a rerun: without that, what it missed would seem more.
        shed_free(state, self.work.reduction.small, self.budget_bytes)
        return state

    def _taken(self, state: Incremental, free: set[int]) -> bool:
        """Whether a state is better, once it fits."""
        polish = Polish(state, sorted(free), self.budget_bytes, evaluations=EVALUATIONS, deadline=self.deadline)
        if not polish.repair() or state.recompute_us >= self.state.recompute_us - WORTH_US:
            return False
        self.state = state
        return True

    # -- which ---------------------------------------------------------------------------------------------------

    def disputed(self, relaxed: Floats) -> set[int]:
        """What the relaxation and the state disagree about, with what the relaxation leaves open."""
        program, _ = self.program()
        return {x for x, v in program.keep.items() if abs(relaxed[v] - float(not self.state.is_dropped(x))) > 1e-6}

    def windows(self) -> Iterator[set[int]]:
        """Pairs of windows of consecutive blocks, without end: one that goes on by half its width, and any other."""
        width = min(MOST_WIDTH, max(LEAST_WIDTH, len(self.blocks) // WINDOWS))
        starts = list(range(0, max(1, len(self.blocks) - width // 2), max(1, width // 2)))
        random = Random(len(self.blocks))
        while True:
            for start in starts:
                other = random.choice(starts)
                yield {*self.blocks[start : start + width], *self.blocks[other : other + width // 2]}
