"""The planned step as the user holds it: called like the old one, kept current, able to explain itself."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import fx

from planner.errors import FileFormatError, PlannerError
from planner.exports.writing import write_export
from planner.ir import Graph
from planner.plan import Plan
from planner.plan_table import write_plan_csv
from planner.simulator import Timeline
from planner.solve import Problem, Solution, Status, solve
from planner.units import human_bytes
from profiler.tracing.eager_ways.assumptions import BrokenAssumption, Turns
from profiler.tracing.guards import Change
from profiler.tracing.ranks.torch_shards import reshard
from profiler.workload import Workload
from rewriter.agreement import agree, agree_on_parameters, ranks_of
from rewriter.budgets import is_share, over_budget
from rewriter.given_plan import GivenPlan
from rewriter.one_plan import ANOTHER_SEQUENCE, answer_of_all, for_own_sizes, overlapped
from rewriter.other_shapes import carried_over, kept
from rewriter.pipeline import Liberties, Limit, Planned, ReadyStep, limit_of, prepare, proven, why_not_proven
from rewriter.proof import Verification, VerificationError
from rewriter.reserving import Ahead, Reserve
from rewriter.settings import PlanSettings

log = logging.getLogger("recompute_planner")

MOST_MEASURED = 16  # graphs of which the times are kept for other shapes

TO_DO_ABOUT_TURNS = (
    ". Keep it a tensor (torch.where decides by one, and `return loss.item()` comes back live), pass it in the batch "
    "as a Python number, or use checkpoint_model, which leaves the loop alive"
)
_OFTEN = 3  # so many new values of one entry of the batch, and the warning names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(PlanSettings):
    """What a planned step was asked for."""

    verify_steps: int
    prove_every: int
    free_gradients: bool
    early_updates: bool
    process_group: Any = None  # of ranks that average the gradients of a plain model


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


NO_COPY = (
    "a planned step changes the model and the optimizer that it was planned with, and is not copied: copy those, and "
    "plan them with checkpoint(..., plan=) and what step.save() wrote"
)


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
        self._turns = Turns(advice=TO_DO_ABOUT_TURNS)
        self._ranks = ranks_of(workload.model, settings.process_group)
        if settings.process_group is not None:
            agree_on_parameters(self._ranks, workload.model)
        self._measured: list[Graph] = []  # of each way through the step one, or a few
        self._ahead = Ahead(settings.reserve, workload.device)
        self._given_bytes = 0  # what the first form was given: a share of it is no less for a smaller batch

    def __repr__(self) -> str:
        return f"a planned step: {self.solution if self._forms else 'nothing is planned yet'}"

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise PlannerError(NO_COPY)

    def __reduce__(self) -> NoReturn:
        raise PlannerError(NO_COPY)

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
            with self._ranks.watched():
                result = form.planned.run(batch)
            self._turns.passed()
            return result
        except BrokenAssumption as broken:  # never with several ranks, none of which could turn round alone
            said = broken
        for other in others:
            if other.mismatches(batch):
                continue
            try:
                result = other.planned.run(batch)
            except BrokenAssumption:
                continue
            self._use(other)
            self._turns.passed()
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
        plan, graph = self.solution.plan, self._forms[0].ready.planned_on
        assert plan is not None
        if Path(path).suffix.lower() == ".csv":
            write_plan_csv(path, graph, plan)
        else:
            plan.save(path, graph)

    def export(self, path: str | Path) -> None:
        """Write the plan used last for others to look at; the end of the name says what for.

        `snapshot.pickle`: PyTorch's memory viewer, planned and as it is. `trace.json`: Perfetto. `policy.json`:
        selective checkpointing (`rewriter.selective.context_fn`).
        """
        write_export(path, self.solution)

    def prove(self, batch: Any, *, steps: int = 1) -> Verification:
        """Run your own step and the planned one from the state of now, and compare every bit; nothing is changed.

        VerificationError names the first tensor that differs.
        """
        if steps < 1:
            raise PlannerError(f"steps={steps}: a proof runs at least one step of each version")
        return self._proven(self._form_for(batch), batch, steps=steps)

    # -- forms ----------------------------------------------------------------------------------------------

    def _form_for(self, batch: Any) -> Form:
        reshard(self._workload.model)  # an evaluation may have left parameters whole
        form, wrong = self._fitting(batch) if self._ranks.size == 1 else self._fitting_all(batch)
        if form is not None:
            self._use(form)
            return form
        self._count_new_numbers()
        self._count_new_entries(batch)
        broken = self._broken(batch)
        self._turns.note(broken, batch)
        self._say_why(wrong)
        turned = any(self._ranks.gathered("looking for a form", bool(broken)))
        return self.prepare(batch, like=self._forms[0] if turned else None)

    def _fitting(self, batch: Any) -> tuple[Form | None, list[str]]:
        """The form that fits this batch; where there is none, why the one used last does not."""
        wrong: list[str] = []
        for form in self._forms:
            mismatches = form.mismatches(batch)
            if not mismatches:
                return form, []
            wrong = wrong or mismatches
        return None, wrong

    def _fitting_all(self, batch: Any) -> tuple[Form | None, list[str]]:
        """The same where ranks step together: a form is one of all of them, as each sees it."""
        mismatches = [form.mismatches(batch) for form in self._forms]
        fits = self._ranks.fits_all([not one for one in mismatches])
        if any(fits):
            return self._forms[fits.index(True)], []
        return None, mismatches[0] or ["another rank has a batch or a model that its last step was not planned for"]

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

        A share is one of the first batch's step; a smaller batch may take as much. Another way through the same step
        may take what `like`, its first one, was given. Another shape takes its times and its plan from those before it,
        unless it turns out to need more memory than that said.
        """
        settings = self._settings
        reshard(self._workload.model)
        # Ranks may know other shapes, and measure together or not at all.
        form = self._prepared(batch, like, known=self._measured if self._ranks.size == 1 else ())
        if form.ready.is_scaled and self._over_bytes(form, batch) > 0:
            log.info("measured after all, because it needs more than the times and sizes of other shapes said")
            form = self._prepared(batch, like, known=())
        self._warn_if_over(form)
        if is_share(settings.budget):
            self._given_bytes = self._given_bytes or form.limit.nbytes
        if not form.ready.is_scaled:
            self._measured = [form.ready.graph, *self._measured][:MOST_MEASURED]
        self._forms = kept(
            [form, *self._forms],
            lambda form: form.ready.planned_on,  # the same on all ranks
            most=settings.most_shapes,
            most_bytes=settings.most_forms_bytes,
        )
        self._ahead.hold_for(form.ready.graph, form.solution)
        return form

    def _prepared(self, batch: Any, like: Form | None, *, known: Sequence[Graph]) -> Form:
        settings = self._settings
        least_bytes = max(self._given_bytes, like.limit.nbytes if like else 0)
        ready = prepare(
            self._workload._replace(batch=batch),
            [settings.budget, *([least_bytes] if least_bytes else [])],
            liberties=Liberties(
                free_gradients=settings.free_gradients,
                early_updates=settings.early_updates,
                optimizer_outside=self._optimizer_outside,
            ),
            in_place=settings.in_place,
            audited=settings.verify_steps > 0,
            show_progress=settings.show_progress,
            cache=settings.cache,
            ranks=self._ranks,
            access=settings.access,
            known=known,
        )
        with self._ranks.together("planning the step"):
            limit, solution = self._solved(ready, least_bytes=least_bytes)
        assert solution.schedule is not None
        ready = replace(ready, workload=self._workload)  # which does not keep the batch alive
        with self._ranks.together("rewriting the step"):
            form = Form(ready=ready, solution=solution, limit=limit, planned=ready.replayed(solution.schedule))
        agree(self._ranks, "the sequence of collectives", form.planned.collectives, otherwise=ANOTHER_SEQUENCE)
        with self._ranks.together("proving the planned step"):
            return self._proven_at_first(form, batch)

    # -- plans ----------------------------------------------------------------------------------------------

    def _solved(self, ready: ReadyStep, *, least_bytes: int) -> tuple[Limit, Solution]:
        settings, given = self._settings, self._given(ready.planned_on)
        keeps_all = ready.as_it_is and (given is None or given.keeps_all)
        limit = limit_of(ready, settings.budget, in_place=settings.in_place, keeps_all=keeps_all)
        if limit.nbytes < least_bytes:
            least_bytes += limit.elsewhere_bytes
            limit = limit_of(ready, least_bytes, in_place=settings.in_place, keeps_all=keeps_all)
        problem = limit.problem(ready.planned_on, time_limit_s=settings.time_limit_s, in_place=settings.in_place)
        if settings.access is not None:
            problem = settings.access.offered_in(problem)
        problem = replace(problem, reserves_ahead=settings.reserve is Reserve.ARENA)
        if ready.ranks.size == 1:
            solution = self._answer(problem, given)
        else:
            solution = self._answer_of_all(ready, limit, problem, given)
        return limit, overlapped(_fitting_solution(solution, limit), ready.planned_on)

    def _answer(self, problem: Problem, given: GivenPlan | None) -> Solution:
        if given:
            return solve(problem, given)
        earlier = [form.solution for form in self._forms] if self._ranks.size == 1 else []
        return carried_over(problem, earlier, self._planned_anew)

    def _planned_anew(self, problem: Problem) -> Solution:
        return self._settings.cache.solved(problem, self._settings.strategy, label=self._settings.label)

    def _answer_of_all(self, ready: ReadyStep, limit: Limit, problem: Problem, given: GivenPlan | None) -> Solution:
        """Rank 0's answer to a problem that is the same on all ranks, judged by each for its own sizes."""

        def fitting(problem: Problem) -> Solution:
            return _fitting_solution(self._answer(problem, given), limit)

        return for_own_sizes(answer_of_all(ready.ranks, problem, fitting), ready.graph)

    def _given(self, graph: Graph) -> GivenPlan | None:
        """The plan from the file; a form that turns up later and does not match it is planned like any other."""
        if self._settings.plan_file is None:
            return None
        try:
            return GivenPlan(Plan.load(self._settings.plan_file, graph))
        except FileFormatError:
            if not self._forms:
                raise
            return None

    # -- proofs ---------------------------------------------------------------------------------------------

    def _proven_at_first(self, form: Form, batch: Any) -> Form:
        steps = self._settings.verify_steps
        if not steps:
            return replace(form, solution=proven(form.solution, None, why_not="verify=False"))
        reasons = self._ranks.gathered("asking for memory to compare in", why_not_proven(form.ready, steps=steps))
        why_not = next(filter(None, reasons), "")
        if why_not:
            warnings.warn(f"this plan is unproven: {why_not}", UserWarning, stacklevel=4)
            return replace(form, solution=proven(form.solution, None, why_not=why_not))
        return self._with_proof(form, batch, steps=steps)

    def _proven(self, form: Form, batch: Any, *, steps: int) -> Verification:
        """A proof of the form in use, noted in it."""
        with self._ranks.together("proving the planned step"):
            self._forms[0] = self._with_proof(form, batch, steps=steps)
        self._warn_if_over(self._forms[0])
        assert self._forms[0].verification is not None
        return self._forms[0].verification

    def _with_proof(self, form: Form, batch: Any, *, steps: int) -> Form:
        found = form.ready.proof(form.planned, form.solution, batch, steps=steps)
        if not found.exact:
            raise VerificationError(
                f"the planned step differs from yours: {found}. Nothing was changed. "
                "Does the step keep state of its "
                f"own from call to call{_told(form.ready.traced.convention.guards.changes)}? Then pass that in the "
                "batch, or use checkpoint_model(model, budget=...). If not, please report it with the model and "
                "optimizer; until then checkpoint(..., in_place=False) or another strategy may help"
            )
        return replace(form, verification=found, solution=proven(form.solution, found))

    def _over_bytes(self, form: Form, batch: Any) -> int:
        """By how much a form was, or now is, measured over its budget."""
        found = form.verification
        peak = form.planned.seen(batch, steps=1).peak_bytes if found is None else found.measured_peak_bytes
        return form.ready.graph.start_bytes + peak - form.limit.nbytes

    def _warn_if_over(self, form: Form) -> None:
        found = form.verification
        over_bytes = 0 if found is None else self._over_bytes(form, None)
        if over_bytes > 0:
            warnings.warn(
                f"the planned step was measured at {human_bytes(over_bytes)} over the budget of "
                f"{human_bytes(form.limit.nbytes)}: {found}",
                UserWarning,
                stacklevel=5,
            )


def _fitting_solution(solution: Solution, limit: Limit) -> Solution:
    """The solution itself; OverBudget where it does not fit."""
    if solution.status is not Status.FITS:
        raise over_budget(solution, limit.nbytes, limit.margin_bytes, elsewhere_bytes=limit.elsewhere_bytes)
    return solution


def _told(changes: Sequence[Change]) -> str:
    return f" (it changed {'; '.join(map(str, changes[:3]))})" if changes else ""
