"""`ilp` with a host link: keep, recompute or move, with a proven lower bound on recomputing and waiting together.

The linear relaxation of `strategies.ilp.moving` gives the bound, and whole points near it give candidates. Each is
placed exactly (`planner.placement`); what is still over the budget goes on by μ-TWO's picks; where the judge finds
bytes or waits that the program did not see, it gets rows there and is solved again. The best of all, of `mutwo` and of
what `ilp` finds without the link is improved window by window (`strategies.ilp.windows`) and polished by exact local
search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise

import numpy as np

import strategies
from planner.analysis import floor
from planner.errors import NoPlan
from planner.incremental import Incremental
from planner.placement import Placement, place
from planner.plan import BoundClass, Plan, with_bound
from planner.solve import Problem
from planner.units import human_bytes
from strategies.ilp.joint_polish import WORTH_US, JointPolish
from strategies.ilp.linear import Floats, SparseModel
from strategies.ilp.moving import MovingProgram
from strategies.ilp.shared_work import (
    FEW,
    KEEP_ALL,
    Bytes,
    Work,
    backward_starts,
    first_moments,
    state_of,
    tell_tried,
    worst,
)
from strategies.ilp.solvers import Answer, Outcome, SolverError, SolverName, solve_model
from strategies.ilp.standing import Found as Without
from strategies.ilp.windows import WINDOW, fixed_outside, windows
from strategies.mutwo.swapping import Choice, Swapping

ROUNDS = 8
WORTH_A_ROUND = 0.25  # of what the bound lacks: what a round has to gain for another one
FORWARD_WINDOWS = 6
SHARE_WITHOUT_LINK = 0.5  # of the time, at most, for what can be done without
NODES = 10  # to make a point near the relaxation whole
NODES_A_WINDOW = 5
NODES_IF_FEW = 5000  # for the whole program of a small graph
WINDOWS = 9  # that are decided anew
LARGE_CELLS = 100_000_000  # variables times rows, from which windows may have parts of tensors away
WORTH_A_WINDOW = 1e-3  # of the extra time: what such a window has to promise
EVALUATIONS = 1500  # of exact placement, to polish
WITH_LINK = "with the link"
WORTH_COUNTING = 5e-4  # of the step: shorter waits get no rows of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan, what it comes to, and who found it; `choice` where it can be polished."""

    plan: Plan
    peak_bytes: int
    extra_us: float
    fits: bool
    who: str
    choice: Choice | None = None


class JointSearch:
    """One call of `Ilp.plan` where there is a host link."""

    def __init__(self, problem: Problem, *, solver: SolverName, gap: float, seeds: bool, effort: float = 1.0) -> None:
        assert problem.host_link is not None
        self.problem, self.link, self.graph = problem, problem.host_link, problem.graph
        self.solver, self.gap, self.seeds, self.effort = solver, gap, seeds, effort
        self.started = time.perf_counter()
        self.deadline = self.started + problem.time_limit_s
        self.work = Work(problem)
        self.best: Found | None = None
        self.smallest: Found | None = None
        self.bound_us = 0.0
        self.impossible = False
        self.cut_off = False
        self.failure = ""
        self.rows = _Rows(self.work)

    def run(self) -> Plan:
        if self.problem.unplanned.peak_bytes <= self.problem.budget_bytes:
            return KEEP_ALL
        try:
            self._try_seeds()
            self._optimise()
            self._search_windows()
        except SolverError as error:
            self.failure = str(error)
        self._polish_best()
        return self._answer()

    # -- candidates -------------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _try_seeds(self) -> None:
        if self.seeds:
            self._try(strategies.make("mutwo").plan, self.problem.limited(self._left_s()), "mutwo")
        self._try_without_link()

    def _try_without_link(self) -> None:
        """What `ilp` finds without the link, or its proof that this is no better than what there is.

        So the link never makes it worse: the proof takes a moment where the link is worth something, and where it is
        worth little, the search gets a good part of the time; in a graph that is small enough, all that it needs.
        """
        from strategies.ilp.search import Ilp, Search  # which asks for this module

        small = len(self.work.free) <= FEW
        seconds = self._left_s() if small else SHARE_WITHOUT_LINK * self.problem.time_limit_s
        search = Search(
            self.problem.without_link().limited(seconds),
            Ilp(solver=self.solver, gap=self.gap, seeds=self.seeds, effort=self.effort),
            work=self.work,
            smallest=self.best is None,
        )
        if self.best is not None:
            search.best = Without(
                plan=self.best.plan,
                peak_bytes=self.best.peak_bytes,
                recompute_us=self.best.extra_us,
                who=WITH_LINK,
            )
        try:
            plan = search.run()
        except NoPlan:
            return
        self.cut_off |= plan.cut_off
        if plan.found_by != WITH_LINK:
            self._judge(plan, "without the link")

    def _try(self, plan_for: Callable[[Problem], Plan], problem: Problem, who: str) -> None:
        try:
            plan = plan_for(problem)
        except NoPlan:
            return
        self.cut_off |= plan.cut_off
        self._judge(plan, who)

    def _judge(self, plan: Plan, who: str) -> None:
        timeline = self.problem.timeline(plan)
        self._offer(
            Found(
                plan=replace(plan, lower_bound_us=None, bound_class=None, note="", found_by=""),
                peak_bytes=timeline.peak_bytes,
                extra_us=timeline.extra_us,
                fits=self.problem.fits(timeline),
                who=who,
            )
        )

    def _offer_choice(self, choice: Choice, who: str) -> None:
        self._offer(
            Found(
                plan=choice.plan,
                peak_bytes=choice.placed.peak_bytes,
                extra_us=choice.placed.extra_us,
                fits=choice.placed.peak_bytes <= self.problem.budget_bytes,
                who=who,
                choice=choice,
            )
        )

    def _offer(self, found: Found) -> None:
        peak_bytes, extra_us = found.peak_bytes, found.extra_us
        tell_tried(self.problem, found.who, started=self.started, peak_bytes=peak_bytes, extra_us=extra_us)
        if self.smallest is None or found.peak_bytes < self.smallest.peak_bytes:
            self.smallest = found
        if found.fits and (self.best is None or found.extra_us < self.best.extra_us - WORTH_US):
            self.best = found

    def _proven(self) -> bool:
        if self.best is None:
            return self.impossible
        return self.best.extra_us - self.bound_us <= self.gap * self.best.extra_us + 1e-9

    # -- the program ------------------------------------------------------------------------------------------------

    def _optimise(self) -> None:
        if floor(self.graph, in_place=self.problem.in_place, moving=True).nbytes > self.problem.budget_bytes:
            self.impossible = True
            return
        if self.best is not None:  # what it needs to count is what binds
            choice = self._choice_of(self.best)
            self.rows.refine(choice.state, choice.placed, self.problem.budget_bytes)
        for _ in range(ROUNDS):
            if self._proven() or self._out_of_time():
                return
            before = self.best, self.bound_us
            program = self._program(self.rows)
            answer = self._solve_round(program)
            if answer is None or answer.point is None or self._proven():
                return
            grown = self._check(program, answer.point, self.rows, "MILP")
            if not grown or not self._gained(*before):
                return

    def _gained(self, best: Found | None, bound_us: float) -> bool:
        """Whether the plan, or the bound, is nearer to the other one by what is worth another round.

        Each round takes longer than the one before it, and windows bring the plan nearer sooner.
        """
        if self.best is None or best is None:
            return True
        gained_us = (best.extra_us - self.best.extra_us) + (self.bound_us - bound_us)
        return gained_us > WORTH_A_ROUND * (self.best.extra_us - self.bound_us)

    def _out_of_time(self) -> bool:
        spent = self._left_s() <= 0
        self.cut_off |= spent
        return spent

    def _check(self, program: MovingProgram, point: Floats, rows: _Rows, who: str) -> bool:
        """Place a point exactly, go on from there by picks, and count what was missed; False if nothing was."""
        state = self.work.state(program.kept(point))
        moved = {s for s in program.chosen(point) if not state.is_dropped(s)}
        grown = rows.refine(state, self._place(state, moved), self.problem.budget_bytes)
        self._offer_choice(Swapping(self.problem, state=state, moved=sorted(moved), deadline=self.deadline).run(), who)
        return grown

    def _search_windows(self) -> None:
        """Large neighbourhoods of the best plan: one stretch of the step decided anew at a time, all else as it is.

        Rows are counted where this plan needs them, and not where the relaxation did: so it is solved sooner. It ends
        when no window has gained anything.
        """
        if self.best is None or len(self.work.reduction.blocks) <= WINDOW:
            return
        rows, start = _Rows(self.work), self._choice_of(self.best)
        rows.refine(start.state, start.placed, self.problem.budget_bytes)
        program, idle = self._program(rows), 0
        around = windows(self.graph, program.keep)
        for window in islice(cycle(around), round(WINDOWS * self.effort)):
            best = self.best
            if idle == len(around) or self._proven() or self._out_of_time():
                return
            answer = self._solve(self._around(program, best, window), gap=0.5 * self.gap, nodes=NODES_A_WINDOW)
            if answer.point is not None and self._check(program, answer.point, rows, "windows"):
                program = self._program(rows)
            idle = idle + 1 if self.best is best else 0

    def _around(self, program: MovingProgram, best: Found, window: frozenset[int]) -> SparseModel:
        """The program of one window.

        A large one is solved sooner by far where a moment may have a part of a tensor away, which mostly comes true,
        and where only what is better than the plan counts.
        """
        model = fixed_outside(program, program.at(self.problem.budget_bytes), self._choice_of(best), window)
        if model.n_variables * model.n_rows < LARGE_CELLS:
            return model
        return program.in_parts(model).cheaper_than((1 - WORTH_A_WINDOW) * best.extra_us)

    def _solve(self, model: SparseModel, *, gap: float, nodes: int) -> Answer:
        """A whole point, within a number of nodes: the clock is a net below that."""
        nodes = max(1, round(nodes * self.effort))
        answer = solve_model(model, self.solver, time_limit_s=self._left_s(), gap=gap, nodes=nodes)
        self.cut_off |= answer.outcome is Outcome.CUT_OFF
        return answer

    def _program(self, rows: _Rows) -> MovingProgram:
        return MovingProgram(
            self.work.reduction,
            rows.moments,
            rows.inner,
            link=self.link,
            step_bytes=self.work.step_bytes,
            in_place=self.problem.in_place,
            starts=rows.starts,
            ends=rows.ends,
        )

    def _solve_round(self, program: MovingProgram) -> Answer | None:
        """The relaxation for the bound, then a whole point near it; in a small graph the whole program proves more."""
        model = program.at(self.problem.budget_bytes)
        relaxed = solve_model(model.relaxed(), self.solver, time_limit_s=self._left_s(), gap=0.0, corner=False)
        self.cut_off |= relaxed.outcome is Outcome.CUT_OFF
        if not self._learn(relaxed) or relaxed.point is None:
            return None
        if len(program.keep) <= FEW:
            whole = self._solve(model, gap=0.9 * self.gap, nodes=NODES_IF_FEW)
            return whole if self._learn(whole) else None
        return self._solve(model.near(relaxed.point), gap=self.gap, nodes=NODES)

    def _learn(self, answer: Answer) -> bool:
        """Take the bound of an answer; False if there is nothing that fits."""
        if answer.outcome is Outcome.INFEASIBLE:
            self.impossible = self.best is None
            return False
        if math.isfinite(answer.bound):
            self.bound_us = max(self.bound_us, answer.bound)
        return True

    def _place(self, state: Incremental, moved: set[int]) -> Placement:
        return place(
            state,
            sorted(moved),
            budget_bytes=self.problem.budget_bytes,
            link=self.link,
            host_budget_bytes=self.problem.host_budget_bytes,
        )

    def _polish_best(self) -> None:
        best = self.best
        if best is None or self._proven() or self._left_s() <= 0:
            return
        choice = self._choice_of(best)
        evaluations = round(EVALUATIONS * self.effort)
        polish = JointPolish(self.problem, choice, evaluations=evaluations, deadline=self.deadline)
        self._offer_choice(polish.run(), f"polish of {best.who}")
        self.cut_off |= polish.cut_off

    def _choice_of(self, found: Found) -> Choice:
        """What was found as a state and moves: of a seed's plan, our own."""
        if found.choice is not None:
            return found.choice
        moved = {e.storage for e in found.plan.offloads}
        dropped = {e.storage for e in found.plan.evictions} - moved
        state = state_of(self.graph, dropped, in_place=self.problem.in_place)
        return Choice(state=state, moved=tuple(sorted(moved)), placed=self._place(state, moved))

    # -- the answer -------------------------------------------------------------------------------------------------

    def _answer(self) -> Plan:
        found = self.best if self.best is not None else self.smallest
        if found is None:
            least = floor(self.graph, in_place=self.problem.in_place, moving=True).nbytes
            limit = f"ilp: no plan within {self.problem.time_limit_s:.1f} s; no schedule at all runs in less than "
            raise NoPlan(self.failure or f"{limit}{human_bytes(least)}: raise the time limit")
        plan = replace(found.plan, cut_off=self.cut_off, found_by=found.who, note=self._note(found))
        if self.best is None:
            return plan
        bound_us = max(0.0, min(self.bound_us, found.extra_us))
        return with_bound(plan, lower_bound_us=bound_us, bound_class=BoundClass.RECOMPUTE_OR_MOVE_ONCE)

    def _note(self, found: Found) -> str:
        words = [f"ilp: {found.who} won"]
        if self.failure:
            words.append(f"only its seeds; {self.failure}")
        if self.best is None:
            least = floor(self.graph, in_place=self.problem.in_place, moving=True).nbytes
            proof = "proven: nothing that recomputes and moves once fits; " if self.impossible else ""
            words.append(f"{proof}no schedule at all, with the host too, runs in less than {human_bytes(least)}")
        if self.cut_off:
            words.append("cut off by the time limit")
        return "; ".join(words)


class _Rows:
    """Where the program counts bytes and copies: it grows where the judge found it wrong."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.moments = _first_moments(work)
        self.inner: set[tuple[int, int]] = set()
        self.starts: set[int] = set()
        self.ends: set[int] = set()

    def _size(self) -> int:
        return len(self.moments) + len(self.inner) + len(self.starts) + len(self.ends)

    def refine(self, state: Incremental, placed: Placement, budget_bytes: int) -> bool:
        """Count what the exact placement shows; False if all of it was counted already."""
        before = self._size()
        self._count_bytes(state, placed.stage_bytes - budget_bytes)
        self._count_waits(placed, state.graph.time_us)
        return self._size() > before

    def _count_bytes(self, state: Incremental, over: Bytes) -> None:
        for j in worst(over, 6):
            q = state.busiest_run(j)
            if q == j:
                self.moments.add(j)
            elif q in self.work.reduction.root:
                self.inner.add((j, q))

    def _count_waits(self, placed: Placement, time_us: float) -> None:
        long = [j for j, us in placed.stalls.items() if us >= WORTH_COUNTING * time_us]
        self.moments.update(sorted(long, key=lambda j: -placed.stalls[j])[:4])
        freed, needs = sorted({m.after for m in placed.moves}), sorted({m.need for m in placed.moves})
        self.starts.update((*freed[:2], *freed[2::4]))
        self.ends.update((*needs[-2:], *needs[:-2:4]))
        late = sorted((m for m in placed.moves if m.need in long), key=lambda m: -placed.stalls[m.need])
        self.moments.update(max(0, m.back - 1) for m in late[:2])


def _first_moments(work: Work) -> set[int]:
    """Those of `ilp`, and the fullest op of equal windows of the first forward, where copies out must be done."""
    moments = set(first_moments(work.reduction, in_place=work.in_place))
    turns = backward_starts(work.graph)
    if turns:
        filled = Incremental(work.graph, in_place=work.in_place).stage_bytes()
        edges = np.linspace(0, turns[0], FORWARD_WINDOWS + 1).astype(int)
        moments.update(int(a + filled[a:b].argmax()) for a, b in pairwise(edges.tolist()) if b > a)
    return moments
