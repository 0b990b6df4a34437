"""The planned step as the user holds it: called like the old one, kept current, able to explain itself."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from planner.errors import FileFormatError, PlannerError
from planner.ir import Graph
from planner.plan import Plan
from planner.plan_table import write_plan_csv
from planner.simulator import Timeline
from planner.solve import Problem, Solution, Status, Strategy, solve, solve_if_needed
from planner.units import human_bytes
from profiler.tracing.assumptions import BrokenAssumption, Turns
from profiler.tracing.guards import Change
from profiler.workload import Workload
from rewriter.budgets import over_budget
from rewriter.pipeline import Liberties, Limit, Planned, ReadyStep, limit_of, prepare, proven
from rewriter.proof import Verification, VerificationError

_OFTEN = 3  # so many new values of one entry of the batch, and the warning names it

DOES_NOT_FIT = "your own step does not fit in memory beside it, so that it was neither audited nor compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a planned step was asked for."""

    budget: str | int
    strategy: Strategy
    label: str
    time_limit_s: float
    in_place: bool
    plan_file: str | Path | None
    verify_steps: int
    prove_every: int
    most_shapes: int
    free_gradients: bool
    early_updates: bool
    show_progress: bool


@dataclass(frozen=True, kw_only=True)
class Form:
    """One captured, planned and rewritten form of the step."""

    ready: ReadyStep
    solution: Solution
    limit: Limit
    planned: Planned
    verification: Verification | None = None

    def mismatches(self, batch: Any) -> list[str]:
        """What is not as this form assumes; empty where it may run."""
        return self.ready.traced.convention.check(batch)


class CheckpointedStep:
    """A drop-in for the user's train step: same numbers, within the budget.

    A batch of another shape, or a model or optimizer whose baked-in settings changed, is captured and planned
    on first sight; the last few forms are kept.
    """

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self._workload = workload._replace(batch=None)  # a batch is not kept alive
        self._settings = settings
        self._forms: list[Form] = []  # the most recently used first
        self._new_entries: Counter[str] = Counter()  # how often a plain value of the batch was another
        self._new_numbers = 0  # how often a form was left because a number of the optimizer's had changed
        self._calls = 0
        self._turns = Turns()

    def __call__(self, batch: Any) -> Any:
        """One training step on `batch`; returns what the user's own step returns."""
        form = self._form_for(batch)
        if self._settings.prove_every and self._calls and self._calls % self._settings.prove_every == 0:
            self._proven(form, batch, steps=1)
        self._calls += 1
        return self._run(form, batch)

    def _run(self, form: Form, batch: Any) -> Any:
        """One step; where the data lead another way than they did for a form, by the form that goes that way."""
        others = [other for other in self._forms if other is not form]
        try:
            return form.planned.run(batch)
        except BrokenAssumption as broken:
            said = broken
        for other in others:
            if other.mismatches(batch):
                continue
            try:
                result = other.planned.run(batch)
            except BrokenAssumption:
                continue
            self._use(other)
            return result
        self._turns.note([said], batch)
        self._say_why([str(said)])
        return self.prepare(batch, like=form).planned.run(batch)

    def _use(self, form: Form) -> None:
        """The form in use stands first."""
        self._forms = [form, *(other for other in self._forms if other is not form)]

    # -- what it will tell ----------------------------------------------------------------------------------

    @property
    def solution(self) -> Solution:
        """The plan of the form used last: predicted peak and time, and a reason for every tensor."""
        return self._forms[0].solution

    @property
    def verification(self) -> Verification | None:
        """What the last proof found for the form used last; None where there was none."""
        return self._forms[0].verification

    @property
    def module(self) -> fx.GraphModule:
        """The rewritten graph of the form used last."""
        return self._forms[0].planned.module

    def timeline(self) -> Timeline:
        """Bytes at every step of the schedule, and the predicted time."""
        timeline = self.solution.timeline
        assert timeline is not None
        return timeline

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        return self.solution.explain(text)

    def save(self, path: str | Path) -> None:
        """Write the plan used last to a file that `checkpoint(..., plan=path)` reads; `.csv`: as a table for people."""
        plan, graph = self.solution.plan, self.solution.problem.graph
        assert plan is not None
        if Path(path).suffix.lower() == ".csv":
            write_plan_csv(path, graph, plan)
        else:
            plan.save(path, graph)

    def prove(self, batch: Any, *, steps: int = 1) -> Verification:
        """Run your own step and the planned one from the state of now, and compare every bit; nothing is changed.

        VerificationError names the first tensor that differs.
        """
        if steps < 1:
            raise PlannerError(f"steps={steps}: a proof runs at least one step of each version")
        return self._proven(self._form_for(batch), batch, steps=steps)

    # -- forms ----------------------------------------------------------------------------------------------

    def _form_for(self, batch: Any) -> Form:
        wrong: list[str] = []
        for form in self._forms:
            mismatches = form.mismatches(batch)
            if not mismatches:
                self._use(form)
                return form
            wrong = wrong or mismatches
        self._count_new_numbers()
        self._count_new_entries(batch)
        broken = self._broken(batch)
        self._turns.note(broken, batch)
        self._say_why(wrong)
        return self.prepare(batch, like=self._forms[0] if broken else None)

    def _broken(self, batch: Any) -> list[BrokenAssumption]:
        """The reads by which the last form alone does not fit, if it is only them."""
        convention = self._forms[0].ready.traced.convention if self._forms else None
        if convention is None or any(convention.guards.mismatches(convention.optimizer, batch)):
            return []
        return convention.broken(batch)

    def _count_new_numbers(self) -> None:
        convention = self._forms[0].ready.traced.convention if self._forms else None
        if convention is not None and convention.guards.changed_numbers(convention.optimizer):
            self._new_numbers += 1

    def _count_new_entries(self, batch: Any) -> None:
        guard = self._forms[0].ready.traced.convention.guards.batch if self._forms else None
        self._new_entries.update(() if guard is None else guard.changed_entries(batch))

    def _often_new(self) -> str:
        """The plain values of the batch for whose sake alone the step is captured again and again."""
        often = [entry for entry, times in self._new_entries.items() if times >= _OFTEN]
        if not often:
            return ""
        return (
            f"; {' and '.join(often)} had another value {_OFTEN} times or more, and the step reads it: each new one is "
            "captured and planned anew, so pass it as a tensor, or leave it out of the batch if it does not matter"
        )

    def _say_why(self, wrong: list[str]) -> None:
        more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
        more += self._often_new()
        outside = "; from now on the optimizer runs as itself, outside the plan" if self._optimizer_outside else ""
        warnings.warn(
            f"this step is captured and planned anew, because {'; '.join(wrong[:2])}{more}{outside}",
            UserWarning,
            stacklevel=4,
        )

    @property
    def _optimizer_outside(self) -> bool:
        """Whether its numbers change so often (a schedule of momentum, say) that none of them should be baked in."""
        return self._new_numbers > 1 and not self._settings.early_updates

    def prepare(self, batch: Any, *, like: Form | None = None) -> Form:
        """Capture, measure, plan, rewrite and prove for `batch`; OverBudget before anything is changed.

        Another way through the same step may take what `like`, its first one, was given.
        """
        settings = self._settings
        ready = prepare(
            self._workload._replace(batch=batch),
            [settings.budget, *([like.limit.nbytes] if like else [])],
            liberties=Liberties(
                free_gradients=settings.free_gradients,
                early_updates=settings.early_updates,
                optimizer_outside=self._optimizer_outside,
            ),
            in_place=settings.in_place,
            audited=settings.verify_steps > 0,
            show_progress=settings.show_progress,
        )
        limit, solution = self._solved(ready, least_bytes=like.limit.nbytes if like else 0)
        assert solution.schedule is not None
        ready = replace(ready, workload=self._workload)  # which does not keep the batch alive
        form = Form(ready=ready, solution=solution, limit=limit, planned=ready.replayed(solution.schedule))
        form = self._proven_at_first(form, batch)
        self._forms.insert(0, form)
        del self._forms[settings.most_shapes :]
        return form

    # -- plans ----------------------------------------------------------------------------------------------

    def _solved(self, ready: ReadyStep, *, least_bytes: int) -> tuple[Limit, Solution]:
        settings, given = self._settings, self._given(ready.graph)
        keeps_all = ready.as_it_is and (given is None or given.keeps_all)
        limit = limit_of(ready, settings.budget, in_place=settings.in_place, keeps_all=keeps_all)
        if limit.nbytes < least_bytes:
            limit = limit_of(ready, least_bytes, in_place=settings.in_place, keeps_all=keeps_all)
        problem = limit.problem(ready.graph, time_limit_s=settings.time_limit_s, in_place=settings.in_place)
        solution = solve(problem, given) if given else solve_if_needed(problem, settings.strategy, label=settings.label)
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit.nbytes, limit.margin_bytes)
        return limit, solution

    def _given(self, graph: Graph) -> _Given | None:
        """The plan from the file; a form that turns up later and does not match it is planned like any other."""
        if self._settings.plan_file is None:
            return None
        try:
            return _Given(Plan.load(self._settings.plan_file, graph))
        except FileFormatError:
            if not self._forms:
                raise
            return None

    # -- proofs ---------------------------------------------------------------------------------------------

    def _proven_at_first(self, form: Form, batch: Any) -> Form:
        steps = self._settings.verify_steps
        if not steps:
            return replace(form, solution=proven(form.solution, None, why_not="verify=False"))
        if not form.ready.as_it_is:
            warnings.warn(f"this plan is unproven: {DOES_NOT_FIT}", UserWarning, stacklevel=4)
            return replace(form, solution=proven(form.solution, None, why_not=DOES_NOT_FIT))
        return self._with_proof(form, batch, steps=steps)

    def _proven(self, form: Form, batch: Any, *, steps: int) -> Verification:
        """A proof of the form in use, noted in it."""
        self._forms[0] = self._with_proof(form, batch, steps=steps)
        assert self._forms[0].verification is not None
        return self._forms[0].verification

    def _with_proof(self, form: Form, batch: Any, *, steps: int) -> Form:
        found = form.ready.proof(form.planned, form.solution, batch, steps=steps)
        if not found.exact:
            raise VerificationError(
                f"the planned step differs from yours: {found}. Nothing was changed. {form.ready.other_path} "
                "Does the step keep state of its "
                f"own from call to call{_told(form.ready.traced.convention.guards.changes)}? Then pass that in the "
                "batch, or use checkpoint_model(model, budget=...). If not, please report it with the model and "
                "optimizer; until then checkpoint(..., in_place=False) or another strategy may help"
            )
        over_bytes = form.ready.graph.start_bytes + found.measured_peak_bytes - form.limit.nbytes
        if over_bytes > 0:
            warnings.warn(
                f"the planned step was measured at {human_bytes(over_bytes)} over the budget of "
                f"{human_bytes(form.limit.nbytes)}: {found}",
                UserWarning,
                stacklevel=5,
            )
        return replace(form, verification=found, solution=proven(form.solution, found))


def _told(changes: Sequence[Change]) -> str:
    return f" (it changed {'; '.join(map(str, changes[:3]))})" if changes else ""


class _Given:
    """A plan made elsewhere, offered as if it were thought of now."""

    name: ClassVar[str] = "plan file"

    def __init__(self, plan: Plan) -> None:
        # A bound is proven for the times of one graph, and times are measured anew in every run.
        self._plan = replace(plan, lower_bound_us=None, bound_class=None)

    @property
    def keeps_all(self) -> bool:
        return not self._plan.evictions

    def plan(self, problem: Problem) -> Plan:
        return self._plan
