"""`python -m bench ablation`: what each part of the planner is worth, taken away or added at one budget.

On captured graphs of full size with the times of the fixed roofline, so that the table is the same on every machine.
Every plan is judged by the same simulator on the same graph, whatever it was made without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import strategies
from bench.experiments.experiment import Experiment, Table
from bench.experiments.prepared import roofline_graph
from bench.experiments.results_file import save_rows
from bench.show.terminal import stage
from bench.workloads.spec import WorkloadSpec
from planner.analysis import liveness
from planner.errors import NoPlan
from planner.host_link import HostLink
from planner.ir import Graph, Rerun
from planner.plan import Plan, recompute_each_time, recompute_once
from planner.schedule import Run
from planner.solve import Problem
from planner.units import human_bytes
from strategies.mutwo.greedy import curve

MODELS = (WorkloadSpec(model="resnet152", batch=8), WorkloadSpec(model="bert", batch=16, seq=512))
BUDGET = "50%"
TIME_LIMIT_S = 60.0
LINK_GB_PER_S = 24.0


@dataclass(frozen=True, kw_only=True)
class Base:
    """The step that every line is about, its budget in bytes, and how to have its graph with gradients freed early."""

    problem: Problem
    with_early_updates: Callable[[], Graph]

    @property
    def graph(self) -> Graph:
        return self.problem.graph


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A plan, and the problem that says what it comes to."""

    problem: Problem
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line: what is different from the whole, and how a plan is made then."""

    name: str
    what: str
    judged: Callable[[Base], Judged]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """One variant on one step. Bytes are of the total peak; `overhead` is of the step as it is, None without a plan."""

    model: str
    variant: str
    what: str
    budget: str
    budget_bytes: int
    start_bytes: int
    unplanned_peak_bytes: int
    peak_bytes: int | None
    overhead: float | None
    fits: bool


# -- the whole, and other strategies --------------------------------------------------------------------------------


def by(spec: str) -> Callable[[Base], Judged]:
    """What a strategy plans for the step as it is."""
    return lambda base: _planned(base.problem, spec)


def _planned(problem: Problem, spec: str = "ilp") -> Judged:
    return Judged(problem=problem, plan=strategies.make(spec).plan(problem))


# -- parts taken away -----------------------------------------------------------------------------------------------


def without_simulation(base: Base) -> Judged:
    """The greedy's picks until an estimate says that they fit, as if computing a tensor again took no memory."""
    for prefix in curve(base.graph):
        if _estimated_peak_bytes(base.problem, prefix.dropped) <= base.problem.budget_bytes:
            break
    return Judged(problem=base.problem, plan=recompute_once(base.graph, prefix.dropped))


def _estimated_peak_bytes(problem: Problem, dropped: Collection[int]) -> int:
    """What is live at each op of the unplanned step, without what lies idle there and is dropped."""
    graph, steps = problem.graph, problem.schedule(Plan()).steps
    live = np.zeros(len(graph.ops), dtype=np.int64)
    for step, nbytes in zip(steps, problem.unplanned.bytes_at, strict=True):
        if isinstance(step, Run):
            live[step.op] = nbytes
    for storage in dropped:
        idle = liveness(graph)[storage]
        assert idle.idle_after is not None
        live[idle.idle_after + 1 : idle.idle_until] -= graph.storages[storage].nbytes
    return int(live.max())


def without_sharing(base: Base) -> Judged:
    """The greedy's picks, as many as it takes where each need has a recomputation of its own."""
    plans = [recompute_each_time(base.graph, prefix.dropped) for prefix in curve(base.graph) if prefix.dropped]
    if not plans:
        raise NoPlan("the greedy has nothing to drop")
    fitting = (plan for plan in plans if base.problem.fits(base.problem.timeline(plan)))
    return Judged(problem=base.problem, plan=next(fitting, plans[-1]))


def never_again(kind: Rerun, reason: str) -> Callable[[Base], Judged]:
    """A plan where ops of one kind cannot be run a second time."""

    def judged(base: Base) -> Judged:
        ops = tuple(
            replace(op, rerun=Rerun.NEVER, never_reason=reason, rng_state=None) if op.rerun is kind else op
            for op in base.graph.ops
        )
        return _planned(replace(base.problem, graph=replace(base.graph, ops=ops)))

    return judged


def without_in_place(base: Base) -> Judged:
    """A plan where no op may write over an input that dies."""
    return _planned(replace(base.problem, in_place=False))


# -- parts added ----------------------------------------------------------------------------------------------------


def with_moves(base: Base) -> Judged:
    """A plan that may move tensors to the host, too."""
    return _planned(replace(base.problem, host_link=HostLink.of(LINK_GB_PER_S)))


def with_early_updates(base: Base) -> Judged:
    """The same bytes where gradients go as soon as they were used."""
    return _planned(replace(base.problem, graph=base.with_early_updates()))


VARIANTS = (
    Variant(name="everything", what="`ilp`", judged=by("ilp")),
    Variant(name="no solver: the greedy", what="`mutwo`", judged=by("mutwo")),
    Variant(name="no solver: segments", what="`sqrtn`", judged=by("sqrtn")),
    Variant(
        name="the paper's own estimates",
        what="`mutwo:faithful=true`: neither the exact simulator nor shared recomputation",
        judged=by("mutwo:faithful=true"),
    ),
    Variant(
        name="no shared recomputation",
        what="the greedy's picks; every need computes what it lacks for itself",
        judged=without_sharing,
    ),
    Variant(
        name="no simulation",
        what="the greedy stops by an estimate in which computing again takes no memory",
        judged=without_simulation,
    ),
    Variant(
        name="no replayed randomness",
        what="a random op is never run again",
        judged=never_again(Rerun.REPLAY_RNG, "its draws are not replayed"),
    ),
    Variant(
        name="no rerun of batch norms",
        what="an op that also writes statistics is never run again",
        judged=never_again(Rerun.WITHOUT_SIDE_EFFECT, "it also writes"),
    ),
    Variant(name="no in-place forms", what="no op writes over an input that dies", judged=without_in_place),
    Variant(name="and the host", what=f"tensors may also move, at {LINK_GB_PER_S:g} GB/s", judged=with_moves),
    Variant(
        name="and early updates",
        what="gradients are freed, updates applied as soon as they can be; the same bytes",
        judged=with_early_updates,
    ),
)


# -- running --------------------------------------------------------------------------------------------------------


def run_ablation(
    specs: Sequence[WorkloadSpec],
    *,
    budget: str,
    out: Path | None,
    time_limit_s: float = TIME_LIMIT_S,
    graph_of: Callable[[WorkloadSpec], Graph] = roofline_graph,
) -> list[AblationRow]:
    """Every variant on every step; the table, and rows saved as they come."""
    rows: list[AblationRow] = []
    for spec in specs:
        with stage(f"capturing {spec.title}"):
            base = _base(spec, budget, time_limit_s, graph_of)
        for variant in VARIANTS:
            with stage(f"{spec.title}: {variant.name}"):
                rows.append(_row(spec.title, budget, base, variant))
            if out is not None:
                save_rows(out, ABLATION, rows)
    ABLATION.print(f"What each part is worth, at {budget}", rows, caption=CAPTION)
    return rows


CAPTION = (
    "Extra time to the step's own, by the fixed roofline; in brackets the peak, of what the unplanned step adds. Where "
    "the peak is over the budget, by how much."
)


def _base(spec: WorkloadSpec, budget: str, time_limit_s: float, graph_of: Callable[[WorkloadSpec], Graph]) -> Base:
    early = replace(spec, free_gradients=True, early_updates=True)
    problem = Problem.of(graph_of(spec), budget, time_limit_s=time_limit_s)
    return Base(problem=problem, with_early_updates=lambda: graph_of(early))


def _row(model: str, budget: str, base: Base, variant: Variant) -> AblationRow:
    whole = base.problem.unplanned
    row = AblationRow(
        model=model,
        variant=variant.name,
        what=variant.what,
        budget=budget,
        budget_bytes=base.problem.budget_bytes,
        start_bytes=whole.start_bytes,
        unplanned_peak_bytes=whole.peak_bytes,
        peak_bytes=None,
        overhead=None,
        fits=False,
    )
    try:
        judged = variant.judged(base)
    except NoPlan:
        return row
    timeline = judged.problem.timeline(judged.plan)
    return replace(row, peak_bytes=timeline.peak_bytes, overhead=timeline.overhead, fits=judged.problem.fits(timeline))


# -- the table ------------------------------------------------------------------------------------------------------


def ablation_table(rows: Sequence[AblationRow]) -> Table:
    """One line a variant, one column a step."""
    models = tuple(dict.fromkeys(row.model for row in rows))
    found = {(row.variant, row.model): row for row in rows}
    variants = {row.variant: row.what for row in rows}
    lines = [(name, what, *(_cell(found.get((name, model))) for model in models)) for name, what in variants.items()]
    return ("variant", "what is different", *models), lines


def _cell(row: AblationRow | None) -> str:
    if row is None:
        return "-"
    if row.peak_bytes is None or row.overhead is None:
        return "no plan"
    share = (row.peak_bytes - row.start_bytes) / (row.unplanned_peak_bytes - row.start_bytes)
    over = "" if row.fits else f", over by {human_bytes(row.peak_bytes - row.budget_bytes)}"
    return f"{row.overhead:.1%} ({share:.0%}{over})"


ABLATION = Experiment(kind="ablation", rows=(AblationRow,), table=ablation_table)
