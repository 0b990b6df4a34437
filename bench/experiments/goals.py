"""`python -m bench goals`: how soon `ilp` proves its plans, in processor time, against goals set beforehand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import strategies
from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.prepared import measured_graph, roofline_graph
from bench.experiments.results_file import save_rows
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from planner.solve import Problem, Status, solve
from profiler.estimating.devices import find_device
from profiler.estimating.roofline import estimated
from profiler.tracing.whole_step import capture_without_memory
from strategies.ilp.bounds import any_schedule_bound_us

TIME_LIMIT_S = 600.0  # a net: work is what ends a solve, also on a machine that is busy
DEVICE = "A100-80"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """At one budget: the gap to prove, and the processor seconds to do it in."""

    budget: str
    gap: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step, how its graph is had, and what is asked of `ilp` there."""

    spec: WorkloadSpec
    graph: Callable[[WorkloadSpec], Graph]
    goals: tuple[Goal, ...]


def estimated_graph(spec: WorkloadSpec) -> Graph:
    """The graph of a step that no machine here could hold, with the times of a roofline."""
    device = find_device(DEVICE)
    step = capture_without_memory(
        lambda batch: spec.at_batch(batch).make(), spec.batch_size, name=spec.title, target=device.target
    )
    return estimated(step, device)


def _goals(budgets: str, gap: float, cpu_s: float) -> tuple[Goal, ...]:
    return tuple(Goal(budget=budget, gap=gap, cpu_s=cpu_s) for budget in budgets.split(","))


CASES = (
    Case(
        spec=WorkloadSpec(model="resnet152", batch=8),
        graph=measured_graph,
        goals=(
            *_goals("70%,60%,50%", 0.005, 3.0),
            *_goals("45%", 0.015, 10.0),
            *_goals("40%", 0.02, 10.0),
            *_goals("35%", 0.03, 10.0),
        ),
    ),
    Case(
        spec=WorkloadSpec(model="resnet152", batch=16, image=96),
        graph=measured_graph,
        goals=_goals("60%", 0.005, 3.0),
    ),
    Case(
        spec=WorkloadSpec(model="bert", batch=8, seq=128),
        graph=measured_graph,
        goals=_goals("70%,50%,40%", 0.005, 3.0),
    ),
    Case(
        spec=WorkloadSpec(model="gpt2", batch=4, seq=256),
        graph=measured_graph,
        goals=_goals("70%,50%,40%", 0.005, 3.0),
    ),
    Case(
        spec=WorkloadSpec(model="gpt2-xl", batch=8, seq=1024),
        graph=estimated_graph,
        goals=_goals("50%", 0.005, 5.0),
    ),
    Case(
        spec=WorkloadSpec(model="bert-large", batch=32, seq=512),
        graph=estimated_graph,
        goals=_goals("50%", 0.005, 5.0),
    ),
    Case(
        spec=WorkloadSpec(model="densenet121", batch=8),
        graph=roofline_graph,
        goals=_goals("70%,50%,40%,30%", 0.01, 10.0),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalRow:
    """One goal and what came of it. `cpu_s` is the median of several runs; `same` says that all gave one plan."""

    graph: str
    times: str
    budget: str
    goal_gap: float
    goal_cpu_s: float
    gap: float | None
    cpu_s: float
    overhead: float | None
    same: bool
    cut_off: bool
    impossible: bool = False  # proven: no schedule at all fits, however often it recomputes

    @property
    def met(self) -> bool:
        """Whether the gap was proven in the time set for it."""
        return self.gap is not None and self.gap <= self.goal_gap + 1e-5 and self.cpu_s <= self.goal_cpu_s


def run_goals(
    cases: Sequence[Case], *, repeats: int, graphs: Path | None = None, out: Path | None = None
) -> list[GoalRow]:
    """Every goal of every case; graphs are kept in the folder `graphs`, so that a second run measures nothing."""
    rows: list[GoalRow] = []
    for case in cases:
        with stage(f"making the graph of {case.spec.title}"):
            graph = _graph(case, graphs)
        for goal in case.goals:
            with stage(f"planning {case.spec.title} at {goal.budget}, {repeats} times"):
                rows.append(_row(graph, goal, repeats))
            if out is not None:
                save_rows(out, GOALS, rows)
    GOALS.print("Plans against goals", rows, caption="seconds of processor time, the median counts")
    return rows


def _graph(case: Case, folder: Path | None) -> Graph:
    if folder is None:
        return case.graph(case.spec)
    path = folder / f"{case.spec.title.replace(' ', '_')}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        case.graph(case.spec).save(path)
    return Graph.load(path)


def _row(graph: Graph, goal: Goal, repeats: int) -> GoalRow:
    problem = Problem.of(graph, goal.budget, time_limit_s=TIME_LIMIT_S)
    found = [solve(problem, strategies.make(f"ilp:gap={goal.gap}")) for _ in range(repeats)]
    first = found[0]
    return GoalRow(
        graph=graph.name,
        times=str(graph.timing),
        budget=goal.budget,
        goal_gap=goal.gap,
        goal_cpu_s=goal.cpu_s,
        gap=first.gap,
        cpu_s=statistics.median(solution.solve_cpu_s for solution in found),
        overhead=first.overhead,
        same=all(solution.plan == first.plan for solution in found),
        cut_off=any(solution.plan is not None and solution.plan.cut_off for solution in found),
        impossible=first.status is not Status.FITS and math.isinf(any_schedule_bound_us(graph, problem.budget_bytes)),
    )


COLUMNS = (
    "graph", "times", "budget", "more time", "gap to prove", "gap proven", "CPU s allowed", "CPU s", "goal met",
    "same plan each time",
)  # fmt: skip


def goal_cells(row: GoalRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    return (
        row.graph,
        row.times,
        row.budget,
        "-" if row.overhead is None or row.impossible else f"{row.overhead:.2%}",
        f"{row.goal_gap:.1%}",
        "-" if row.gap is None else f"{row.gap:.2%}",
        f"{row.goal_cpu_s:g}",
        f"{row.cpu_s:.2f}",
        "proven impossible" if row.impossible else "yes" if row.met else "no",
        ("yes" if row.same else "no") + (", cut off by the clock" if row.cut_off else ""),
    )


GOALS = Experiment(kind="goals", rows=(GoalRow,), table=line_by_line(COLUMNS, goal_cells))
