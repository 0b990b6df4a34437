"""The planned step as the user holds it: called like the old one, kept current, able to explain itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.optim import Optimizer

from planner.errors import FileFormatError, PlannerError
from planner.explain import Decision
from planner.ir import Graph
from planner.plan import Plan
from planner.schedule import unplanned_schedule
from planner.simulator import Timeline, unplanned
from planner.solve import Problem, Solution, Status, Strategy, solve, solve_if_needed
from planner.units import parse_budget
from profiler.tracing.whole_step import TracedStep, capture
from rewriter.budgets import AUTO, auto_budget, margin_bytes, over_budget
from rewriter.proof import Verification, VerificationError, observe, verify
from rewriter.replay import apply
from rewriter.tight_memory import Ready, measure_within

TrainStep = Callable[[Any, Any, Any], Any]


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
    most_shapes: int
    free_gradients: bool
    early_updates: bool
    show_progress: bool


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One captured, planned and rewritten form of the step."""

    traced: TracedStep
    solution: Solution
    module: fx.GraphModule
    verification: Verification | None


class CheckpointedStep:
    """A drop-in for the user's train step: same numbers, within the budget.

    A batch of another shape, or a model or optimizer whose baked-in settings changed, is captured and planned
    on first sight; the last few forms are kept.
    """

    def __init__(self, train_step: TrainStep, model: nn.Module, optimizer: Optimizer, settings: Settings) -> None:
        self._train_step = train_step
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._forms: list[Prepared] = []  # the most recently used first
        self._new_numbers = 0  # how often a form was left because a number of the optimizer's had changed

    def __call__(self, batch: Any) -> Any:
        """One training step on `batch`; returns what the user's own step returns."""
        form = self._form_for(batch)
        return form.traced.convention.run(form.module, batch)

    # -- what it will tell ----------------------------------------------------------------------------------

    @property
    def solution(self) -> Solution:
        """The plan of the form used last: predicted peak and time, and a reason for every tensor."""
        return self._forms[0].solution

    @property
    def verification(self) -> Verification | None:
        """What `verify=True` found for the form used last."""
        return self._forms[0].verification

    @property
    def module(self) -> fx.GraphModule:
        """The rewritten graph of the form used last."""
        return self._forms[0].module

    def timeline(self) -> Timeline:
        """Bytes at every step of the schedule, and the predicted time."""
        timeline = self.solution.timeline
        assert timeline is not None
        return timeline

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        found = [d for d in self.solution.decisions if self._matches(d, text)]
        if not found:
            return f"no tensor of the step has {text!r} in its name or module path"
        return "\n".join(f"{d.name} ({self._module_of(d) or d.role.value}): {d.reason}" for d in found)

    def _matches(self, decision: Decision, text: str) -> bool:
        return all(word in f"{decision.name} {self._module_of(decision)}" for word in text.split())

    def _module_of(self, decision: Decision) -> str:
        graph = self.solution.problem.graph
        made = graph.maker[decision.storage]
        return "" if made is None else graph.ops[made].module_path

    def save(self, path: str | Path) -> None:
        """Write the plan used last to a file that `checkpoint(..., plan=path)` reads."""
        assert self.solution.plan is not None
        self.solution.plan.save(path, self.solution.problem.graph)

    # -- forms ----------------------------------------------------------------------------------------------

    def _form_for(self, batch: Any) -> Prepared:
        wrong: list[str] = []
        for i, form in enumerate(self._forms):
            mismatches = form.traced.convention.check(batch)
            if not mismatches:
                if i:
                    self._forms.insert(0, self._forms.pop(i))
                return form
            wrong = wrong or mismatches
        if self._forms and self._forms[0].traced.convention.guards.changed_numbers(self._optimizer):
            self._new_numbers += 1
        self._say_why(wrong)
        return self.prepare(batch)

    def _say_why(self, wrong: list[str]) -> None:
        more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
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

    def prepare(self, batch: Any) -> Prepared:
        """Capture, measure, plan and rewrite for `batch`; OverBudget before anything is changed."""
        settings = self._settings
        traced = capture(
            self._train_step,
            self._model,
            self._optimizer,
            batch,
            free_gradients=settings.free_gradients,
            early_updates=settings.early_updates,
            optimizer_outside=self._optimizer_outside,
        )
        limit, _ = self._budget(traced.graph)
        ready = measure_within(traced, batch, limit_bytes=limit, show_progress=settings.show_progress)
        self._check_verifiable(ready)
        traced = ready.traced
        solution = self._solve(ready, batch)
        assert solution.schedule is not None
        module = apply(traced, solution.schedule)
        form = Prepared(traced=traced, solution=solution, module=module, verification=None)
        if settings.verify_steps:
            form = Prepared(traced=traced, solution=solution, module=module, verification=self._verify(form, batch))
        self._forms.insert(0, form)
        del self._forms[settings.most_shapes :]
        return form

    def _check_verifiable(self, ready: Ready) -> None:
        if self._settings.verify_steps and not ready.as_it_is:
            raise PlannerError(
                "verify=True runs your own step beside the planned one, and your own does not fit in memory: verify on "
                "a smaller batch, then plan this one without"
            )

    def _solve(self, ready: Ready, batch: Any) -> Solution:
        settings, graph = self._settings, ready.traced.graph
        given = self._given(graph)
        keeps_all = ready.as_it_is and (given is None or given.keeps_all)
        limit, margin = self._limit(ready.traced, batch, keeps_all=keeps_all)
        problem = Problem(
            graph=graph, budget_bytes=limit - margin, time_limit_s=settings.time_limit_s, in_place=settings.in_place
        )
        solution = solve(problem, given) if given else solve_if_needed(problem, settings.strategy, label=settings.label)
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit, margin)
        return solution

    def _budget(self, graph: Graph) -> tuple[int, int]:
        """The budget in bytes, and the peak of the unplanned step, which a share of it is meant of."""
        peak_bytes = unplanned(graph, in_place=self._settings.in_place).peak_bytes
        return self._as_bytes(graph, peak_bytes), peak_bytes

    def _as_bytes(self, graph: Graph, peak_bytes: int) -> int:
        budget = self._settings.budget
        if budget == AUTO:
            return auto_budget(graph, next(self._model.parameters()).device, torch.cuda)
        return parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)

    def _limit(self, traced: TracedStep, batch: Any, *, keeps_all: bool) -> tuple[int, int]:
        """The budget in bytes, and what of it is kept free: nothing where the step fits it as it is.

        `keeps_all` says that running without any recomputation would be an answer.
        """
        graph = traced.graph
        limit, peak_bytes = self._budget(graph)
        margin = margin_bytes(graph, limit)
        if not keeps_all or not limit - margin < peak_bytes <= limit:
            return limit, margin
        # Too close to trust the prediction, and a needless plan would cost time: let the step itself say.
        measured_bytes = graph.start_bytes + self._measured_peak(traced, batch)
        limit = self._as_bytes(graph, max(peak_bytes, measured_bytes))
        return limit, (0 if measured_bytes <= limit else margin_bytes(graph, limit))

    def _measured_peak(self, traced: TracedStep, batch: Any) -> int:
        """What the captured step really adds to memory when it runs unplanned; everything is put back."""
        module = apply(traced, unplanned_schedule(traced.graph, in_place=self._settings.in_place))
        seen = observe(
            lambda b: traced.convention.call(module, b),
            self._model,
            self._optimizer,
            batch,
            steps=2,  # a first step may still make what later ones find there
            unread_gradients=[slot.tensor() for slot in traced.convention.dropped],
            generators=traced.generators,
            tensors=traced.written_outside(batch),
        )
        return seen.peak_bytes

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

    def _verify(self, form: Prepared, batch: Any) -> Verification:
        convention = form.traced.convention
        timeline = form.solution.timeline
        assert timeline is not None
        found = verify(
            lambda b: self._train_step(self._model, self._optimizer, b),
            lambda b: convention.call(form.module, b),
            self._model,
            self._optimizer,
            batch,
            predicted_peak_bytes=timeline.above_start_bytes,
            unread_gradients=[slot.tensor() for slot in convention.dropped],
            generators=form.traced.generators,
            tensors=form.traced.written_outside(batch),
            compare_gradients=not self._settings.free_gradients,
            steps=self._settings.verify_steps,
        )
        if not found.exact:
            raise VerificationError(
                f"the planned step differs from yours: {found}. Nothing was changed. Please report it with the model "
                "and optimizer; until then checkpoint(..., in_place=False) or another strategy may help"
            )
        return found


class _Given:
    """A plan made elsewhere, offered as if it were thought of now."""

    name: ClassVar[str] = "plan file"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def keeps_all(self) -> bool:
        return not self._plan.evictions

    def plan(self, problem: Problem) -> Plan:
        return self._plan
