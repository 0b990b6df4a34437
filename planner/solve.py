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

from planner.allocator import Allocator, Held, held
from planner.analysis import candidates
from planner.arena import arrange
from planner.culprits import why_nothing_moves
from planner.errors import BudgetError, NoPlan, PlanError, PlannerError, StrategyError
from planner.explain import Decision, explain
from planner.host_link import HostLink
from planner.ir import Graph, Rerun
from planner.plan import BoundClass, Plan, Restore
from planner.schedule import Schedule, lower, unplanned_schedule
from planner.simulator import Timeline, simulate, unplanned
from planner.units import human_bytes, is_reserved, parse_budget

log = logging.getLogger("recompute_planner")

DEFAULT_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph to be run within a budget. `in_place` says whether schedules may use in-place forms.

    With a `host_link` a plan may move tensors to the host and back, at most `host_budget_bytes` of them at a time.

    A plan that recomputes for longer than `most_recompute_us` is of no use to whoever asks: a strategy may leave
    such plans out, or ignore this. `allocator` is who hands out the memory of a GPU; None where none holds more than
    what lives. With `most_reserved_bytes`, what it holds is bounded as well; no strategy need know of it. With
    `reserves_ahead`, it is asked for one piece as large as a schedule's arena before the first step.
    """

    graph: Graph
    budget_bytes: int
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    in_place: bool = True
    most_recompute_us: float = math.inf
    host_link: HostLink | None = None
    host_budget_bytes: int | None = None
    allocator: Allocator | None = None
    most_reserved_bytes: int | None = None
    reserves_ahead: bool = False

    @staticmethod
    def of(
        graph: Graph,
        budget: str | int,
        *,
        time_limit_s: float = DEFAULT_TIME_LIMIT_S,
        in_place: bool = True,
        host_link: HostLink | None = None,
        host_budget_bytes: int | None = None,
    ) -> Problem:
        """The problem of a budget as people state it: bytes, '4GiB', or '60%' of what the unplanned step adds.

        Of 'reserved:4GiB' it bounds what PyTorch's allocator on a GPU holds.
        """
        peak_bytes = unplanned(graph, in_place=in_place).peak_bytes
        limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)
        reserved = is_reserved(budget)
        return Problem(
            graph=graph,
            budget_bytes=limit,
            time_limit_s=time_limit_s,
            in_place=in_place,
            host_link=host_link,
            host_budget_bytes=host_budget_bytes,
            allocator=Allocator.CACHING if reserved else None,
            most_reserved_bytes=limit if reserved else None,
        )

    def __post_init__(self) -> None:
        if self.host_budget_bytes is not None and self.host_budget_bytes < 0:
            raise BudgetError(f"a host budget of {self.host_budget_bytes} bytes: give 0 or more, or None for any")
        if self.reserves_ahead and self.allocator is None:
            raise BudgetError("memory reserved ahead needs to know the allocator: give Problem(allocator=...)")
        if self.most_reserved_bytes is not None and self.allocator is None:
            raise BudgetError("a limit on reserved memory needs to know the allocator: give Problem(allocator=...)")
        if not 0 <= self.time_limit_s < math.inf:
            raise BudgetError(f"a time limit of {self.time_limit_s} s: give a number of seconds, 0 or more")

    def limited(self, time_limit_s: float, *, most_recompute_us: float = math.inf) -> Problem:
        """The same problem with less time, and only for plans that recompute for at most so long."""
        return replace(self, time_limit_s=max(0.0, time_limit_s), most_recompute_us=most_recompute_us)

    def held(self, schedule: Schedule) -> Held | None:
        """What the allocator of this problem holds while `schedule` runs; None where there is no such allocator."""
        if self.allocator is None:
            return None
        ahead_bytes = arrange(self.graph, schedule).nbytes if self.reserves_ahead else 0
        return held(self.graph, schedule, allocator=self.allocator, ahead_bytes=ahead_bytes)

    @property
    def fits_unplanned(self) -> bool:
        """Whether the step is within the budget as it is."""
        if self.unplanned.peak_bytes > self.budget_bytes:
            return False
        if self.most_reserved_bytes is None:
            return True
        found = self.held(self.schedule(Plan()))
        return found is not None and found.reserved_bytes <= self.most_reserved_bytes

    def schedule(self, plan: Plan) -> Schedule:
        """The steps that `plan` means here."""
        if not plan.evictions:
            return unplanned_schedule(self.graph, in_place=self.in_place)
        return lower(self.graph, plan, in_place=self.in_place, link=self.host_link)

    def without_link(self) -> Problem:
        """The same problem for plans that move nothing to the host."""
        return replace(self, host_link=None, host_budget_bytes=None)

    def fits(self, timeline: Timeline) -> bool:
        """Whether a schedule's bytes are within the budgets, here and on the host."""
        over_host = self.host_budget_bytes is not None and timeline.host_peak_bytes > self.host_budget_bytes
        return timeline.peak_bytes <= self.budget_bytes and not over_host

    def timeline(self, plan: Plan) -> Timeline:
        """What the judge will say of `plan`."""
        return simulate(self.graph, self.schedule(plan)) if plan.evictions else self.unplanned

    @property
    def unplanned(self) -> Timeline:
        """The step without any plan."""
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
        peak, cost = timeline.peak_bytes, timeline.extra_us
        rank = (False, cost, peak) if problem.fits(timeline) else (True, peak, cost)
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
        """(extra time - its proven lower bound) / extra time; None without a bound."""
        if self.plan is None or self.timeline is None or self.plan.lower_bound_us is None:
            return None
        cost = self.timeline.extra_us
        return (cost - self.plan.lower_bound_us) / cost if cost > 0 else 0.0

    @property
    def overhead(self) -> float | None:
        """Extra time as a fraction of the step as it is."""
        return None if self.timeline is None else self.timeline.overhead

    @cached_property
    def held(self) -> Held | None:
        """What the allocator is predicted to hold of the GPU; None on a CPU, and without a plan."""
        return None if self.schedule is None else self.problem.held(self.schedule)

    @property
    def dropped(self) -> tuple[int, ...]:
        """The activations that the plan drops and computes again."""
        evictions = self.plan.evictions if self.plan else ()
        evicted = {e.storage for e in evictions if e.how is Restore.RECOMPUTE}
        return tuple(s for s in candidates(self.problem.graph) if s in evicted)

    @property
    def moved(self) -> tuple[int, ...]:
        """The storages that the plan moves to the host and back."""
        return tuple(sorted({e.storage for e in self.plan.offloads})) if self.plan else ()

    @cached_property
    def why_nothing_moves(self) -> str:
        """Why a plan with a host link does not use it; "" where it does, or where there is none."""
        link, timeline, schedule = self.problem.host_link, self.timeline, self.schedule
        if link is None or timeline is None or schedule is None or self.moved:
            return ""
        limit = self.problem.host_budget_bytes
        return why_nothing_moves(self.problem.graph, schedule, timeline, link, host_budget_bytes=limit)

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
        reserved = "" if self.held is None else f", {human_bytes(self.held.reserved_bytes)} reserved"
        return (
            f"{head}: peak {human_bytes(timeline.peak_bytes)}{reserved} (unplanned {human_bytes(base.peak_bytes)}, "
            f"budget {_limit_text(self.problem)}), {timeline.overhead:.1%} more time "
            f"({graph.timing}){bound}; drops {len(self.dropped)} of {len(candidates(graph))} activations"
            + self._moves()
            + (f"; {self.proof}" if self.proof else "")
        )

    def _moves(self) -> str:
        if self.timeline is None or self.problem.host_link is None or (not self.dropped and not self.moved):
            return ""
        if not self.moved:
            return f", moves nothing to the host: {self.why_nothing_moves}"
        size, share = human_bytes(self.timeline.moved_bytes), self.timeline.stall_us / max(self.timeline.base_us, 1e-9)
        words = f"{size} at {self.problem.host_link}, {share:.1%} waiting"
        return f", moves {len(self.moved)} to the host and back ({words})"


def _limit_text(problem: Problem) -> str:
    kind = "" if problem.most_reserved_bytes is None else " reserved"
    return f"{human_bytes(problem.most_reserved_bytes or problem.budget_bytes)}{kind}"


def solve(problem: Problem, strategy: Strategy, *, label: str = "") -> Solution:
    """Ask `strategy` for a plan and judge it.

    StrategyError names a strategy that fails or gives no plan at all, PlanError one whose plan cannot be carried out.
    """
    label = label or strategy.name
    if problem.most_reserved_bytes is None:
        return _solved(problem, strategy, label)
    from planner.reserved import solved_within_reserved  # which needs the types of this module

    return solved_within_reserved(
        problem, lambda within: _solved(within, strategy, label), most_bytes=problem.most_reserved_bytes
    )


def _solved(problem: Problem, strategy: Strategy, label: str) -> Solution:
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        plan = _with_hidden_waits(problem.graph, _proposal(problem, strategy, label))
    except NoPlan as answer:
        log.info("%s on %s: no plan: %s", label, problem.graph.name, answer)
        times = {"solve_s": time.perf_counter() - started, "solve_cpu_s": time.process_time() - cpu_started}
        return without_plan(problem, label, str(answer), **times)
    solve_s, solve_cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    schedule, timeline = _judged(problem, plan, label)
    fits = problem.fits(timeline)
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


def without_plan(problem: Problem, label: str, reason: str, *, solve_s: float, solve_cpu_s: float) -> Solution:
    """The answer of a strategy that has none."""
    return Solution(
        strategy=label,
        problem=problem,
        status=Status.NO_PLAN,
        plan=None,
        schedule=None,
        timeline=None,
        solve_s=solve_s,
        solve_cpu_s=solve_cpu_s,
        reason=reason,
    )


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


def _with_hidden_waits(graph: Graph, plan: Plan) -> Plan:
    """The plan with a bound that holds here: a strategy counts a repeated collective whole, which ops may hide."""
    if not plan.lower_bound_us:
        return plan
    hidden_us = sum(op.time_us for op in graph.ops if op.waits and op.rerun is not Rerun.NEVER)
    return replace(plan, lower_bound_us=max(0.0, plan.lower_bound_us - hidden_us)) if hidden_us else plan


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
    if not problem.fits_unplanned:
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
    if bound > timeline.extra_us * (1 + 1e-9) + 1e-6:
        raise PlanError(
            f"{label}: claims that no plan recomputes and waits in less than {bound:.1f} µs, but its own takes "
            f"{timeline.extra_us:.1f} µs"
        )


def _reason(problem: Problem, plan: Plan, timeline: Timeline) -> str:
    over = timeline.peak_bytes - problem.budget_bytes
    if over > 0:
        return (
            f"smallest peak found {human_bytes(timeline.peak_bytes)}, {human_bytes(over)} over the budget of "
            f"{human_bytes(problem.budget_bytes)}{f'; {plan.note}' if plan.note else ''}"
        )
    host_bytes = problem.host_budget_bytes
    if host_bytes is not None and timeline.host_peak_bytes > host_bytes:
        return f"moves {human_bytes(timeline.host_peak_bytes)} to the host, which may hold {human_bytes(host_bytes)}"
    return f"peak {human_bytes(timeline.peak_bytes)} within {human_bytes(problem.budget_bytes)}"
