"""From a strategy's proposal to a judged Solution. Only this file lowers, simulates and sets a status."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

from planner.analysis import candidates
from planner.errors import BudgetError, NoPlan, PlanError, PlannerError, StrategyError
from planner.explain import Decision, explain
from planner.ir import Graph
from planner.plan import BoundClass, Plan
from planner.schedule import Schedule, lower, unplanned_schedule
from planner.simulator import Timeline, simulate, unplanned
from planner.units import human_bytes, parse_budget

log = logging.getLogger("recompute_planner")

DEFAULT_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph to be run within a budget. `in_place` says whether schedules may use in-place forms.

    A plan that recomputes for longer than `most_recompute_us` is of no use to whoever asks: a strategy may leave
    such plans out, or ignore this.
    """

    graph: Graph
    budget_bytes: int
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    in_place: bool = True
    most_recompute_us: float = math.inf

    @staticmethod
    def of(
        graph: Graph, budget: str | int, *, time_limit_s: float = DEFAULT_TIME_LIMIT_S, in_place: bool = True
    ) -> Problem:
        """The problem of a budget as people state it: bytes, '4GiB', or '60%' of what the unplanned step adds."""
        peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
        limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)
        return Problem(graph=graph, budget_bytes=limit, time_limit_s=time_limit_s, in_place=in_place)

    def __post_init__(self) -> None:
        if not 0 <= self.time_limit_s < math.inf:
            raise BudgetError(f"a time limit of {self.time_limit_s} s: give a number of seconds, 0 or more")

    def limited(self, time_limit_s: float, *, most_recompute_us: float = math.inf) -> Problem:
        """The same problem with less time, and only for plans that recompute for at most so long."""
        return replace(self, time_limit_s=max(0.0, time_limit_s), most_recompute_us=most_recompute_us)

    def schedule(self, plan: Plan) -> Schedule:
        """The steps that `plan` means here."""
        if not plan.evictions:
            return unplanned_schedule(self.graph, in_place=self.in_place)
        return lower(self.graph, plan, in_place=self.in_place)

    def timeline(self, plan: Plan) -> Timeline:
        """What the judge will say of `plan`."""
        return simulate(self.graph, self.schedule(plan)) if plan.evictions else self.unplanned

    @property
    def unplanned(self) -> Timeline:
        """The step without any recomputation."""
        return unplanned(self.graph, in_place=self.in_place)


def cheapest(problem: Problem, plans: Iterable[Plan], *, deadline: float = math.inf) -> Plan:
    """The plan that fits and costs the least time; if none fits, the one with the smallest peak.

    After `deadline`, a time of `time.perf_counter`, no further one is judged, and the plan says that it was cut off.
    """
    best: tuple[tuple[bool, float, float], Plan] | None = None
    for plan in plans:
        if best is not None and time.perf_counter() > deadline:
            return replace(best[1], cut_off=True)
        timeline = problem.timeline(plan)
        peak, cost = timeline.peak_bytes, timeline.recompute_us
        rank = (True, peak, cost) if peak > problem.budget_bytes else (False, cost, peak)
        if best is None or rank < best[0]:
            best = rank, plan
    if best is None:
        raise NoPlan("there is no plan to choose from")
    return best[1]


@runtime_checkable
class Strategy(Protocol):
    """Proposes a plan. Options are dataclass fields; `plan` is deterministic and mutates nothing."""

    name: ClassVar[str]

    def plan(self, problem: Problem) -> Plan:
        """The best plan found, even over budget; NoPlan(reason) if there is none."""
        ...


class Status(Enum):
    """What the judge says of a proposal."""

    FITS = "fits"
    OVER_BUDGET = "over budget"
    NO_PLAN = "no plan"


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A judged proposal: its schedule is what the rewriter replays, its timeline what it will cost."""

    strategy: str
    problem: Problem
    status: Status
    plan: Plan | None
    schedule: Schedule | None
    timeline: Timeline | None
    solve_s: float
    solve_cpu_s: float  # processor time: what `solve_s` would be on a machine with nothing else to do
    reason: str
    proof: str = ""  # whether the replayed step was seen to do the user's arithmetic; "" where nobody asked

    @property
    def gap(self) -> float | None:
        """(recompute time - its proven lower bound) / recompute time; None without a bound."""
        if self.plan is None or self.timeline is None or self.plan.lower_bound_us is None:
            return None
        cost = self.timeline.recompute_us
        return (cost - self.plan.lower_bound_us) / cost if cost > 0 else 0.0

    @property
    def overhead(self) -> float | None:
        """Extra time as a fraction of the step without recomputation."""
        return None if self.timeline is None else self.timeline.overhead

    @property
    def dropped(self) -> tuple[int, ...]:
        """The activations that the plan drops."""
        evicted = {e.storage for e in self.plan.evictions} if self.plan else set()
        return tuple(s for s in candidates(self.problem.graph) if s in evicted)

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        """A reason for every storage, in id order."""
        if self.plan is None or self.schedule is None:
            return ()
        return explain(self.problem.graph, self.plan, self.schedule)

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        graph = self.problem.graph
        made = {d.storage: graph.maker[d.storage] for d in self.decisions}
        modules = {s: "" if op is None else graph.ops[op].module_path for s, op in made.items()}
        words = text.split()
        found = [d for d in self.decisions if all(word in f"{d.name} {modules[d.storage]}" for word in words)]
        if not found:
            return f"no tensor of the step has {text!r} in its name or module path"
        return "\n".join(f"{d.name} ({modules[d.storage] or d.role.value}): {d.reason}" for d in found)

    def __str__(self) -> str:
        graph, timeline = self.problem.graph, self.timeline
        head = f"{self.strategy} on {graph.name}: {self.status.value}"
        if timeline is None:
            return f"{head} ({self.reason})"
        base = self.problem.unplanned
        bound = "" if self.gap is None else f", within {self.gap:.1%} of the optimum"
        return (
            f"{head}: peak {human_bytes(timeline.peak_bytes)} (unplanned {human_bytes(base.peak_bytes)}, "
            f"budget {human_bytes(self.problem.budget_bytes)}), {timeline.overhead:.1%} more time "
            f"({graph.timing}){bound}; drops {len(self.dropped)} of {len(candidates(graph))} activations"
            + (f"; {self.proof}" if self.proof else "")
        )


def solve(problem: Problem, strategy: Strategy, *, label: str = "") -> Solution:
    """Ask `strategy` for a plan and judge it.

    StrategyError names a strategy that fails or gives no plan at all, PlanError one whose plan cannot be carried out.
    """
    label = label or strategy.name
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        plan = _proposal(problem, strategy, label)
    except NoPlan as answer:
        log.info("%s on %s: no plan: %s", label, problem.graph.name, answer)
        return Solution(
            strategy=label,
            problem=problem,
            status=Status.NO_PLAN,
            plan=None,
            schedule=None,
            timeline=None,
            solve_s=time.perf_counter() - started,
            solve_cpu_s=time.process_time() - cpu_started,
            reason=str(answer),
        )
    solve_s, solve_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    schedule, timeline = _judged(problem, plan, label)
    fits = timeline.peak_bytes <= problem.budget_bytes
    solution = Solution(
        strategy=label,
        problem=problem,
        status=Status.FITS if fits else Status.OVER_BUDGET,
        plan=plan,
        schedule=schedule,
        timeline=timeline,
        solve_s=solve_s,
        solve_cpu_s=solve_cpu_s,
        reason=_reason(problem, plan, timeline),
    )
    log.info("solved in %.2f s: %s", solve_s, solution)
    return solution


def _proposal(problem: Problem, strategy: Strategy, label: str) -> Plan:
    try:
        plan = strategy.plan(problem)
    except (PlannerError, MemoryError):  # which say what is wrong, or are no fault of the strategy's
        raise
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise StrategyError(f"{label}: plan() raised {words:.200}") from error
    if not isinstance(plan, Plan):
        raise StrategyError(f"{label}: plan() returned {plan!r:.60}, not a Plan; where it has none, it raises NoPlan")
    return plan


def _judged(problem: Problem, plan: Plan, label: str) -> tuple[Schedule, Timeline]:
    try:
        schedule = problem.schedule(plan)
        timeline = simulate(problem.graph, schedule) if plan.evictions else problem.unplanned
    except PlanError as error:
        raise PlanError(f"{label}: {error}") from error
    _check_bound(label, plan, timeline)
    return schedule, timeline


def solve_if_needed(problem: Problem, strategy: Strategy, *, label: str = "") -> Solution:
    """`solve`, unless the step fits as it is: then the empty plan, whose reason says that there was nothing to do."""
    if problem.unplanned.peak_bytes > problem.budget_bytes:
        return solve(problem, strategy, label=label)
    found = solve(problem, _Nothing(), label=label or strategy.name)
    return replace(found, reason=_nothing_to_do(problem))


@dataclass(frozen=True)
class _Nothing:
    """The empty plan: no recomputation, which no plan can beat."""

    name: ClassVar[str] = "nothing to do"

    def plan(self, problem: Problem) -> Plan:
        return Plan(lower_bound_us=0.0, bound_class=BoundClass.ANY_SCHEDULE, note=_nothing_to_do(problem))


def _nothing_to_do(problem: Problem) -> str:
    peak, budget = human_bytes(problem.unplanned.peak_bytes), human_bytes(problem.budget_bytes)
    return f"nothing to do: the step's own peak of {peak} is within the budget of {budget}; it runs unplanned"


def _check_bound(label: str, plan: Plan, timeline: Timeline) -> None:
    bound = plan.lower_bound_us
    if bound is None:
        return
    if plan.bound_class is None:
        raise PlanError(f"{label}: a bound of {bound:.1f} µs without the class of schedules that it holds for")
    if not 0 <= bound < math.inf:
        raise PlanError(f"{label}: a bound of {bound} µs bounds nothing")
    if bound > timeline.recompute_us * (1 + 1e-9) + 1e-6:
        raise PlanError(
            f"{label}: claims that no plan recomputes in less than {bound:.1f} µs, but its own takes "
            f"{timeline.recompute_us:.1f} µs"
        )


def _reason(problem: Problem, plan: Plan, timeline: Timeline) -> str:
    over = timeline.peak_bytes - problem.budget_bytes
    if over > 0:
        return (
            f"smallest peak found {human_bytes(timeline.peak_bytes)}, {human_bytes(over)} over the budget of "
            f"{human_bytes(problem.budget_bytes)}{f'; {plan.note}' if plan.note else ''}"
        )
    return f"peak {human_bytes(timeline.peak_bytes)} within {human_bytes(problem.budget_bytes)}"
