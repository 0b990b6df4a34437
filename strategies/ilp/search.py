"""`ilp`: the optimum of "keep, or recompute once", with a proven lower bound.

A mixed-integer program with few memory rows (`strategies.ilp.program`) is solved. Its keep set is checked by the
exact simulator; where that finds too many bytes, the program gets a memory row there and is solved again. Where
`mutwo` has a plan for a large graph, the program decides parts of it anew (`strategies.ilp.neighbourhoods`), and the
whole only proves how good that is. What is found is polished by local search, and returned unless a seed (`mutwo`,
`sqrtn`) is better.

How far it goes is counted in work (nodes, windows, evaluations; `effort` scales them), so that the same call gives the
same plan however busy the machine is. The time limit is a net below that, and the plan says where it was needed.

The bound holds for the plans of `planner.plan.recompute_once`, whatever they drop, temporaries included. With a host
link, `strategies.ilp.joint` decides between keeping, recomputing and moving.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

import strategies
from planner.analysis import floor
from planner.errors import NoPlan, StrategyError
from planner.incremental import Incremental
from planner.plan import Plan
from planner.solve import Problem
from strategies.ilp.alike import alike, counted
from strategies.ilp.bounds import any_schedule_bound_us
from strategies.ilp.joint import JointSearch
from strategies.ilp.linear import Floats, SparseModel
from strategies.ilp.neighbourhoods import DISPUTED_ATTEMPTS, Neighbourhoods
from strategies.ilp.polish import Polish, enumerate_all, shed_free
from strategies.ilp.program import StagedProgram
from strategies.ilp.shared_work import FEW, KEEP_ALL, Places, Work, first_moments, state_of
from strategies.ilp.smallest import smallest_peak
from strategies.ilp.solvers import TOLERANCE, Answer, Outcome, SolverError, SolverName, solve_model
from strategies.ilp.standing import SEEDS, Found, Standing

ROUNDS = 60
SECONDS_FOR_ANY_SCHEDULE = 2.0  # to prove that no schedule at all fits, when nothing was found
EVALUATIONS = 4000  # of the exact simulator, for each candidate that is polished
FEW_EVALUATIONS = 1000  # for one that will be looked at again
PROOFS = 4  # each may find a candidate in its way, and where memory must be counted to be rid of it
ALMOST = 0.002  # over the budget: what is worth repairing
RELAXATIONS = 6
REPEATED = 0.25  # classes to a block, up to which blocks are counted by class
SCARCE = 3  # places, up to which memory is counted there alone
DISPUTED_SHARE = 0.2  # of the blocks, up to which what is disputed is solved at once
WINDOWS = 24
IDLE_WINDOWS = 5  # without gain, after which no further one is tried
CELLS = 400_000_000  # variables times rows times nodes of a program that is solved whole
LEAST_NODES = 20
SURE = 0.9  # of the gap, so that a plan that costs what the program says is within it
TIGHT = 0.1  # of the gap, where all that is wanted of the program is its bound
TIGHTEST = 0.02  # of the gap, where that is soon had
TRY_EVERY_SET = 12  # storages, up to which what the program leaves open is settled by trying every set
SQRTN_SIMULATIONS = 90  # about what the seed `sqrtn` costs; a tenth where it need only beat what there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Ilp:
    """`gap` is the proven relative gap at which it stops; `seeds=false` shows what it finds alone.

    `effort` scales the work that it does where the gap is not reached before.
    """

    name: ClassVar[str] = "ilp"
    solver: SolverName = SolverName.ORTOOLS
    gap: float = 0.005
    seeds: bool = True
    effort: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gap < 1:
            raise StrategyError(f"gap={self.gap}: it is a fraction, such as 0.005")
        if not 0 < self.effort < math.inf:
            raise StrategyError(f"effort={self.effort}: it is a factor, such as 1 or 10")

    def plan(self, problem: Problem) -> Plan:
        if problem.host_link is not None:
            return JointSearch(problem, solver=self.solver, gap=self.gap, seeds=self.seeds, effort=self.effort).run()
        return Search(problem, self).run()


class Search(Standing):
    """One call of `Ilp.plan`. `work` carries over from other budgets on the same graph, and so does a bound.

    Where nothing can fit it looks for the `smallest` peak there is, unless nobody wants to know.
    """

    def __init__(
        self,
        problem: Problem,
        options: Ilp,
        *,
        work: Work | None = None,
        bound_us: float = 0.0,
        smallest: bool = True,
    ) -> None:
        super().__init__(problem, gap=options.gap, bound_us=bound_us)
        self.wants_smallest = smallest
        self.options = options
        self.deadline = self.started + problem.time_limit_s
        self.work = work if work is not None else Work(problem)
        self.near: Neighbourhoods | None = None

    def run(self) -> Plan:
        if self.problem.unplanned.peak_bytes <= self.problem.budget_bytes:
            return KEEP_ALL
        self._try_seed("mutwo")
        try:
            self._optimise()
            self._shrink_if_nothing_fits()
        except SolverError as error:
            self.failure = str(error)
        if self.best is None or not self._proven():
            self._try_seed("sqrtn")
        self._polish_a_seed()
        self._try_every_set()
        return self._answer()

    # -- candidates -------------------------------------------------------------------------------------------

    def _left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def _try_seed(self, name: str) -> None:
        if not self.options.seeds:
            return
        if self.best is not None and self._left_s() <= 0:
            self.cut_off = True
            return
        most_us = self.best.recompute_us if self.best is not None else math.inf
        try:
            plan = strategies.make(name).plan(self.problem.limited(self._left_s(), most_recompute_us=most_us))
        except NoPlan:  # none that is worth having
            return
        self.cut_off |= plan.cut_off
        timeline = self.problem.timeline(plan)
        found = Found(plan=plan, peak_bytes=timeline.peak_bytes, recompute_us=timeline.recompute_us, who=name)
        self._offer(found)

    # -- the program ------------------------------------------------------------------------------------------

    def _optimise(self) -> None:
        if floor(self.graph, in_place=self.problem.in_place).nbytes > self.problem.budget_bytes:
            self.impossible = True
            return
        if not self._may_improve():
            self._solve_and_count()
        for _ in range(PROOFS):
            if self._may_improve():
                self._improve()
            if self.best is None or self._proven() or self.impossible or self._searching_s() <= 0:
                break
            before = self._progress()
            if self._raise_bound() or (self.near is not None and self._progress() == before):
                break
        self.cut_off |= self._searching_s() <= 0 and not self._proven()

    def _progress(self) -> tuple[float, int, bool]:
        """What a proof may change so that another one has more to go on."""
        assert self.best is not None
        return self.best.recompute_us, self.work.places.counted, self.near is not None and self.near.slack_bytes > 0

    def _may_improve(self) -> bool:
        """Whether there is a plan of a large graph to start from."""
        return self.best is not None and not self._proven() and len(self.work.reduction.blocks) > FEW

    def _improve(self) -> None:
        """Decide anew what the relaxation has otherwise, and windows; the relaxation gets tighter meanwhile."""
        assert self.best is not None
        near = self.near = self._neighbourhoods(self.best)
        if near is None:
            return
        around = near
        for number in range(RELAXATIONS):
            if self._proven() or self._searching_s() <= 0:
                break
            program = self.work.program()
            relaxed = self._solve(program.at(self.problem.budget_bytes).relaxed(), bounds=True, corner=False)
            if relaxed.point is None or self._proven():
                break
            guide = relaxed.point
            if number == 0:
                around = self._where_scarce(near, program, relaxed.point)
                if around is near and not self._proven():
                    guide = self._count_alike(program, otherwise=guide)
            if self._proven() or not self._decide_anew(around, guide):
                break
        near.state = around.state

    def _decide_anew(self, near: Neighbourhoods, relaxed: Floats) -> bool:
        """What is disputed if that is little, or windows; True if anything was gained."""
        disputed = near.disputed(relaxed)
        few = len(disputed) <= DISPUTED_SHARE * len(near.blocks)
        if few and near.around(disputed, attempts=DISPUTED_ATTEMPTS):
            self._offer_state(near.state, "MILP")
            return True
        return self._sweep(near)

    def _where_scarce(self, near: Neighbourhoods, program: StagedProgram, relaxed: Floats) -> Neighbourhoods:
        """All decided anew by a program that counts memory only where the relaxation is at the budget.

        Where that is in few places, it goes on from there; elsewhere from `near`.
        """
        moments, inner = program.where_full(relaxed, self.problem.budget_bytes)
        places = Places(self.work.reduction, moments, inner, in_place=self.problem.in_place)
        few = Neighbourhoods(
            self.work, near.state, self.options.solver, self.problem.budget_bytes, deadline=self.deadline, places=places
        )
        counted_by_class = 0
        while 0 < places.counted <= SCARCE and not self._proven() and self._searching_s() > 0:
            if counted_by_class != places.counted:
                counted_by_class = places.counted
                self._count_alike(places.program(), otherwise=relaxed)
            if self._proven() or not few.around(set(few.blocks)):
                break
            self._offer_state(few.state, "MILP")
        near.state = few.state
        return few if 0 < places.counted <= SCARCE else near

    def _count_alike(self, program: StagedProgram, *, otherwise: Floats) -> Floats:
        """Learn from the bound of a program where only numbers of equal blocks are whole; its point, if it has one."""
        classes = alike(self.work.reduction)
        if len(classes) > REPEATED * len(program.keep):
            return otherwise
        model = counted(program, program.at(self.problem.budget_bytes), classes)
        answer = self._solve(model, bounds=True, gap=TIGHTEST * self.options.gap)
        return answer.point if answer.point is not None else otherwise

    def _sweep(self, near: Neighbourhoods) -> bool:
        """Decide windows anew, one after another; True if anything was gained."""
        idle, before_us = 0, near.state.recompute_us
        for number, free in enumerate(near.windows()):
            idle = 0 if near.around(free) else idle + 1
            if idle == 0:
                self._offer_state(near.state, "windows")
            spent = number >= WINDOWS * self.options.effort or idle >= IDLE_WINDOWS
            if spent or self._proven() or self._searching_s() <= 0:
                break
        return near.state.recompute_us < before_us

    def _neighbourhoods(self, found: Found) -> Neighbourhoods | None:
        """The best plan in the terms of the program; None where it cannot be told in them."""
        dropped = {e.storage for e in found.plan.evictions}
        state = self.work.state(x for x in self.work.reduction.blocks if x not in dropped)
        shed_free(state, self.work.reduction.small, self.problem.budget_bytes)
        self._polish(state, f"polish of {found.who}", evaluations=FEW_EVALUATIONS)
        if state.peak()[0] > self.problem.budget_bytes:
            return None
        near = Neighbourhoods(self.work, state, self.options.solver, self.problem.budget_bytes, deadline=self.deadline)
        near.slack_bytes = self.near.slack_bytes if self.near is not None else 0
        return near

    def _solve_and_count(self) -> None:
        """Solve, check exactly, count memory where it was missed, and again."""
        budget = target = self.problem.budget_bytes
        excluded: list[frozenset[int]] = []
        for _ in range(ROUNDS):
            if self._proven() or self._searching_s() <= 0:
                break
            program = self.work.program()
            bounds = target == budget and (not excluded or self.work.reduction.whole)
            solved = self._solve_round(program, program.at(target, excluded), bounds=bounds)
            if solved is None or self._proven():
                break
            kept, state = solved
            over = state.stage_bytes() - budget
            if self.work.places.count_there(state, over):
                target = budget
            elif over.max() <= 0:
                self._polish(state, "polish")
                break
            elif len(program.keep) <= FEW:
                excluded.append(kept)
            else:
                target -= max(int(over.max()), budget // 10000)
            if over.max() <= self.work.step_bytes // 50 or len(program.keep) <= FEW:
                self._polish(state, "polish")
            if self._may_improve():
                break

    def _raise_bound(self) -> bool:
        """Whatever the candidates came from: the whole program at the budget itself proves most.

        False if it found where memory must be counted to prove more.
        """
        program = self.work.program()
        model = program.at(self.problem.budget_bytes)
        if self.near is not None:
            return self._refute_in_steps(program, model, self.near)
        answer = self._solve(model, bounds=True)
        if answer.point is not None and not self._proven():
            _, state = self._check(program, answer.point)
            self._polish(state, "polish")
        return True

    def _refute_in_steps(self, program: StagedProgram, model: SparseModel, near: Neighbourhoods) -> bool:
        """First by a program that counts memory in few places; then also where the relaxation is at the budget.

        Where the relaxation is at the budget in very few places, these are enough.
        """
        relaxed = self._solve(model.relaxed(), bounds=True, corner=False)
        if relaxed.point is None:
            return True
        known = True
        first = first_moments(self.work.reduction, in_place=self.problem.in_place)
        tight, inner = program.where_full(relaxed.point, self.problem.budget_bytes)
        scarce = 0 < len(tight) + len(inner) <= SCARCE
        for moments, at in ((tight, inner),) if scarce else ((first, []), (first.union(tight), inner)):
            if self._proven() or self._searching_s() <= 0:
                return True
            refuting = StagedProgram(self.work.reduction, moments, at, in_place=self.problem.in_place)
            known &= self._refute(refuting, near)
        return known

    def _refute(self, program: StagedProgram, near: Neighbourhoods) -> bool:
        """Prove that nothing is cheaper by more than the gap asked for; what contradicts it is a candidate."""
        assert self.best is not None
        enough_us = (1 - self.options.gap) * self.best.recompute_us
        cheaper = program.at(self.problem.budget_bytes).cheaper_than(enough_us)
        answer = self._solve(cheaper, gap=TIGHT * self.options.gap)
        proven_us = enough_us if answer.outcome is Outcome.INFEASIBLE else min(answer.bound, enough_us)
        if math.isfinite(proven_us):
            self.bound_us = max(self.bound_us, (1 - TOLERANCE) * proven_us)
        if answer.point is None:
            return True
        _, state = self._check(program, answer.point)
        known = near.counts(state)
        if state.peak()[0] <= (1 + ALMOST) * self.problem.budget_bytes:
            self._polish(state, "polish", evaluations=FEW_EVALUATIONS)
        return known

    def _solve_round(
        self, program: StagedProgram, model: SparseModel, *, bounds: bool
    ) -> tuple[frozenset[int], Incremental] | None:
        """First the linear relaxation and the whole points near it; the whole program only where that is not enough.

        Returns the last keep set found, with its exact state; None without one.
        """
        relaxed = self._solve(model.relaxed(), bounds=bounds)
        if relaxed.point is None:
            return None
        near = self._solve(model.near(relaxed.point), share=0.3, cut_off_counts=False)
        solved = None
        if near.point is not None:
            solved = self._check(program, near.point)
            if self._proven() or solved[1].peak()[0] > self.problem.budget_bytes:
                return solved
        answer = self._solve(model, hint=near.point, bounds=bounds)
        return solved if answer.point is None else self._check(program, answer.point)

    def _solve(
        self,
        model: SparseModel,
        *,
        bounds: bool = False,
        hint: Floats | None = None,
        share: float = 0.75,
        cut_off_counts: bool = True,
        corner: bool = True,
        gap: float | None = None,
    ) -> Answer:
        """Solve within a share of the time left; learn from its bound if it is one."""
        nodes = int(self.options.effort * CELLS / max(1, model.n_variables * model.n_rows))
        answer = solve_model(
            model,
            self.options.solver,
            time_limit_s=share * max(0.0, self._searching_s()),
            gap=gap if gap is not None else SURE * self.options.gap,
            hint=hint,
            corner=corner,
            nodes=max(LEAST_NODES, nodes),
        )
        self.cut_off |= cut_off_counts and answer.outcome is Outcome.CUT_OFF
        if bounds and answer.outcome is Outcome.INFEASIBLE:
            self.impossible = self.best is None
        elif bounds and math.isfinite(answer.bound):
            self.bound_us = max(self.bound_us, answer.bound)
        return answer

    def _check(self, program: StagedProgram, point: Floats) -> tuple[frozenset[int], Incremental]:
        """The exact state of a point's keep set, offered as a candidate."""
        kept = frozenset(program.kept(point))
        state = self.work.state(kept)
        if state.peak()[0] > self.problem.budget_bytes:
            shed_free(state, self.work.reduction.small, self.problem.budget_bytes)
        self._offer_state(state, "MILP")
        return kept, state

    def _searching_s(self) -> float:
        """Time left for the program: some is kept back for the seed that comes last."""
        if not self.options.seeds or self._optimal():
            return self._left_s()
        share, simulations = (0.25, SQRTN_SIMULATIONS) if self.best is None else (0.05, SQRTN_SIMULATIONS // 10)
        return self._left_s() - min(share * self.problem.time_limit_s, simulations * self.work.simulation_s)

    def _polish(self, state: Incremental, who: str, *, evaluations: int = EVALUATIONS) -> None:
        polish = Polish(
            state,
            self.work.movable,
            self.problem.budget_bytes,
            evaluations=min(evaluations, 4 * len(self.work.movable) ** 2),
            deadline=self.deadline,
        )
        polish.run()
        self.cut_off |= polish.cut_off
        self._offer_state(state, who)

    def _polish_a_seed(self) -> None:
        if self.best is None or self.best.who not in SEEDS or self._proven() or self._left_s() <= 0:
            return
        dropped = {e.storage for e in self.best.plan.evictions}
        state = state_of(self.graph, dropped, in_place=self.problem.in_place)
        self._polish(state, f"polish of {self.best.who}")

    def _shrink_if_nothing_fits(self) -> None:
        """Look for the smallest peak there is, and prove how small it can be."""
        if self.best is not None or (self.impossible and not self.wants_smallest):
            return
        self.hopeless = self._no_schedule_fits()
        found = smallest_peak(self.work, self.options.solver, deadline=self.deadline)
        self.floor_bytes = found.floor_bytes
        self.impossible |= found.floor_bytes > self.problem.budget_bytes
        self.cut_off |= found.cut_off
        if found.state is not None:
            self._offer_state(found.state, "MILP")
            self._polish(found.state, "polish")

    def _no_schedule_fits(self) -> bool:
        """Whether it is proven that no amount of recomputation would do."""
        seconds = min(SECONDS_FOR_ANY_SCHEDULE, self._left_s() / 4)
        if seconds <= 0:
            return floor(self.graph, in_place=self.problem.in_place).nbytes > self.problem.budget_bytes
        bound_us = any_schedule_bound_us(
            self.graph,
            self.problem.budget_bytes,
            solver=self.options.solver,
            time_limit_s=seconds,
            in_place=self.problem.in_place,
        )
        return math.isinf(bound_us)

    def _try_every_set(self) -> None:
        """A graph this small leaves no question open."""
        if self._optimal() or self.impossible or len(self.work.free) > TRY_EVERY_SET:
            return
        state = Incremental(self.graph, in_place=self.problem.in_place)
        dropped = enumerate_all(state, self.work.free, self.problem.budget_bytes)
        if dropped is None:
            self.impossible = True
            return
        self._offer_state(state_of(self.graph, dropped, in_place=self.problem.in_place), "trying every set")
        if self.best is not None:
            self.bound_us, self.cut_off = self.best.recompute_us, False
