"""From a strategy's proposal to a judged Solution. Only this file lowers, simulates and sets a status."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

from planner.errors import BudgetError, NoPlan, PlanError
from planner.ir import Graph, Role
from planner.plan import (
    BoundClass,
    Plan,
    Restore,
    Run,
    RunKind,
    Schedule,
    candidates,
    cannot_drop,
    lower,
    recompute_each_time,
    rerun_reads,
    temporaries,
)
from planner.simulator import Timeline, simulate

DEFAULT_TIME_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph to be run within a budget. `in_place` says whether schedules may use in-place forms."""

    graph: Graph
    budget_bytes: int
    time_limit_s: float = DEFAULT_TIME_LIMIT_S
    in_place: bool = True

    def timeline(self, plan: Plan) -> Timeline:
        """What the judge will say of `plan`."""
        return simulate(self.graph, lower(self.graph, plan, in_place=self.in_place))

    @cached_property
    def unplanned(self) -> Timeline:
        """The step without any recomputation."""
        return self.timeline(Plan())


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


class Choice(Enum):
    """What becomes of a storage."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    NOT_A_CHOICE = "not a choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One storage: what was decided, and the numbers behind it.

    `recompute_us` is what bringing it back costs from what the plan keeps. `live` are the spans of ops (from
    the one that makes it to the last that uses it) in which it is resident.
    """

    storage: int
    name: str
    role: Role
    choice: Choice
    nbytes: int
    recompute_us: float | None
    live: tuple[tuple[str, str], ...]
    reason: str


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
    reason: str

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
        return tuple(_Explainer(self.problem.graph, self.plan, self.schedule).all())

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
        )


def solve(problem: Problem, strategy: Strategy, *, label: str = "") -> Solution:
    """Ask `strategy` for a plan and judge it. A malformed plan is a bug and propagates as PlanError."""
    label = label or strategy.name
    started = time.perf_counter()
    try:
        plan = strategy.plan(problem)
    except NoPlan as answer:
        return Solution(
            strategy=label,
            problem=problem,
            status=Status.NO_PLAN,
            plan=None,
            schedule=None,
            timeline=None,
            solve_s=time.perf_counter() - started,
            reason=str(answer),
        )
    solve_s = time.perf_counter() - started
    schedule = lower(problem.graph, plan, in_place=problem.in_place)
    timeline = simulate(problem.graph, schedule)
    _check_bound(label, plan, timeline)
    fits = timeline.peak_bytes <= problem.budget_bytes
    return Solution(
        strategy=label,
        problem=problem,
        status=Status.FITS if fits else Status.OVER_BUDGET,
        plan=plan,
        schedule=schedule,
        timeline=timeline,
        solve_s=solve_s,
        reason=_reason(problem, timeline),
    )


def _check_bound(label: str, plan: Plan, timeline: Timeline) -> None:
    bound = plan.lower_bound_us
    if bound is None:
        return
    once = plan.bound_class is BoundClass.RECOMPUTE_ONCE
    if plan.bound_class is None or (once and any(e.how is not Restore.RECOMPUTE for e in plan.evictions)):
        raise PlanError(f"{label}: a bound of {bound:.1f} µs without a class of schedules that the plan belongs to")
    if bound > timeline.recompute_us * (1 + 1e-9) + 1e-6:
        raise PlanError(
            f"{label}: claims that no plan recomputes in less than {bound:.1f} µs, but its own takes "
            f"{timeline.recompute_us:.1f} µs"
        )


def _reason(problem: Problem, timeline: Timeline) -> str:
    over = timeline.peak_bytes - problem.budget_bytes
    if over > 0:
        return (
            f"smallest peak found {human_bytes(timeline.peak_bytes)}, {human_bytes(over)} over the budget of "
            f"{human_bytes(problem.budget_bytes)}"
        )
    return f"peak {human_bytes(timeline.peak_bytes)} within {human_bytes(problem.budget_bytes)}"


# -- why each storage was kept or dropped -----------------------------------------------------------------------


class _Explainer:
    def __init__(self, graph: Graph, plan: Plan, schedule: Schedule) -> None:
        self.graph = graph
        self.evicted = {e.storage for e in plan.evictions}
        self.candidates = set(candidates(graph))
        self.temporaries = set(temporaries(graph))
        self.spans = residency(graph, schedule)

    def all(self) -> Iterable[Decision]:
        for storage in self.graph.storages:
            yield self._decision(storage.id)

    def _decision(self, storage: int) -> Decision:
        record, choice = self.graph.storages[storage], self._choice(storage)
        cost = self._cost(storage) if choice is not Choice.NOT_A_CHOICE else None
        ops = self.graph.ops
        return Decision(
            storage=storage,
            name=self.graph.storage_names[storage],
            role=record.role,
            choice=choice,
            nbytes=record.nbytes,
            recompute_us=cost,
            live=tuple((ops[first].name, ops[last].name) for first, last in self.spans.get(storage, ())),
            reason=self._words(storage, choice, cost),
        )

    def _choice(self, storage: int) -> Choice:
        if storage in self.evicted and storage in self.candidates:
            return Choice.RECOMPUTE
        return Choice.KEEP if storage in self.candidates else Choice.NOT_A_CHOICE

    def _cost(self, storage: int) -> float:
        """Run time of the ops that make `storage` from inputs and from what the plan keeps."""
        graph, chain = self.graph, set[int]()
        wanted = [graph.maker[storage]]
        while wanted:
            op_id = wanted.pop()
            if op_id is None or op_id in chain:
                continue
            chain.add(op_id)
            sources = (graph.values[v].storage for v in rerun_reads(graph.ops[op_id]))
            wanted.extend(graph.maker[s] for s in sources if s in self.evicted)
        return sum(graph.ops[op].time_us for op in chain)

    def _words(self, storage: int, choice: Choice, cost: float | None) -> str:
        graph = self.graph
        size, live = human_bytes(graph.storages[storage].nbytes), graph.liveness[storage]
        if choice is Choice.NOT_A_CHOICE:
            if storage in self.temporaries:
                return "the backward never reads it"
            return cannot_drop(graph, storage) or "its inputs change before it could be recomputed, or it never idles"
        assert live.idle_after is not None
        assert live.idle_until is not None
        idle = f"idle from {graph.ops[live.idle_after].name} to {graph.ops[live.idle_until].name}"
        verb = "dropped" if choice is Choice.RECOMPUTE else "kept"
        return f"{verb}: {size} {idle}, {cost:.0f} µs to recompute"


def residency(graph: Graph, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Per storage made by the step: the spans in which it is resident, as (op that ran first, op that ran last)."""
    spans: dict[int, list[tuple[int, int]]] = {}
    since: dict[int, int] = {}
    current = 0
    for step in schedule.steps:
        if isinstance(step, Run):
            current = step.op
            gone = [step.into] if step.into is not None else []
            op = graph.ops[step.op]
            new = [*graph.makes[step.op]]
            if step.kind is RunKind.ORIGINAL_SAVING_RNG and op.rng_state is not None:
                new.append(op.rng_state)
            for storage in new:
                since.setdefault(storage, current)
        else:
            gone = [step.storage]
        for storage in gone:
            spans.setdefault(storage, []).append((since.pop(storage), current))
    for storage, first in since.items():
        spans.setdefault(storage, []).append((first, current))
    return spans


# -- many strategies, many budgets ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a comparison."""

    graph: str
    strategy: str
    budget: str
    solution: Solution


def compare(
    graph: Graph,
    strategies: Sequence[tuple[str, Strategy]],
    budgets: Sequence[str | int],
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    in_place: bool = True,
) -> list[Row]:
    """Every labelled strategy at every budget, on one graph, judged alike."""
    peak = simulate(graph, lower(graph, Plan(), in_place=in_place)).peak_bytes
    rows = []
    for budget in budgets:
        limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak)
        problem = Problem(graph=graph, budget_bytes=limit, time_limit_s=time_limit_s, in_place=in_place)
        for label, strategy in strategies:
            solution = solve(problem, strategy, label=label)
            rows.append(Row(graph=graph.name, strategy=label, budget=str(budget), solution=solution))
    return rows


COLUMNS = ("graph", "budget", "strategy", "status", "peak", "of step", "overhead", "dropped", "gap", "seconds", "note")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS. `of step` is the peak above the start, relative to the unplanned."""
    solution, timeline = row.solution, row.solution.timeline
    head = (row.graph, row.budget, row.strategy, solution.status.value)
    seconds = f"{solution.solve_s:.2f}"
    if timeline is None:
        return (*head, "-", "-", "-", "-", "-", seconds, solution.reason)
    base = solution.problem.unplanned
    share = timeline.above_start_bytes / base.above_start_bytes if base.above_start_bytes else 1.0
    note = solution.reason if solution.status is not Status.FITS else (solution.plan.note if solution.plan else "")
    return (
        *head,
        human_bytes(timeline.peak_bytes),
        f"{share:.0%}",
        f"{timeline.overhead:.1%}",
        str(len(solution.dropped)),
        "-" if solution.gap is None else f"{solution.gap:.1%}",
        seconds,
        note,
    )


def table(rows: Sequence[Row]) -> str:
    """The comparison as plain text, one row a line."""
    lines = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


# -- budgets and bytes ------------------------------------------------------------------------------------------

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_budget(budget: str | int, *, start_bytes: int, peak_bytes: int) -> int:
    """Bytes of total peak. `"p%"` means start + p% of what the unplanned step adds to it."""
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise BudgetError(f"budget {budget!r}: give bytes as a whole number, or text such as '4GiB' or '60%'")
    match = _BUDGET.fullmatch(str(budget))
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise BudgetError(f"budget {budget!r}: give bytes ('4000000', '4GiB', '900MB') or a share of the step ('60%')")
    number = float(match[1])
    if number == 0:
        raise BudgetError(f"budget {budget!r}: nothing runs in no memory; the step starts at {human_bytes(start_bytes)}")
    if unit != "%":
        return int(number * _UNITS[unit])
    return start_bytes + int(number / 100 * (peak_bytes - start_bytes))


def human_bytes(nbytes: int) -> str:
    """Bytes as people write them: '0.97 GiB'."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
