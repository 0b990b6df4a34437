"""The planned step as the user holds it: called like the old one, kept current, able to explain itself."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.optim import Optimizer

from planner.errors import BudgetError, FileFormatError, PlannerError
from planner.explain import Decision
from planner.floor import floor
from planner.ir import Graph
from planner.plan import Plan
from planner.schedule import Schedule, lower
from planner.simulator import Timeline, simulate
from planner.solve import Problem, Solution, Status, Strategy, solve, solve_if_needed
from planner.units import human_bytes, parse_budget
from profiler.capture import TracedStep, capture
from profiler.measure import measure
from rewriter.apply import apply
from rewriter.verify import Verification, VerificationError, observe, verify

TrainStep = Callable[[Any, Any, Any], Any]

# What the prediction was ever seen to be off by, of what a step adds to memory: kept free below the budget.
MARGIN = 0.005

# What a GPU's caching allocator may lose between its blocks, of the whole memory: left out of budget="auto".
FRAGMENTATION = 0.03


class OverBudget(PlannerError):  # noqa: N818 - an answer, not a fault
    """No plan meets the budget; says the smallest peak found, the floor, and what would help."""


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
        self._say_why(wrong)
        return self.prepare(batch)

    def _say_why(self, wrong: list[str]) -> None:
        more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
        warnings.warn(
            f"this step is captured and planned anew, because {'; '.join(wrong[:2])}{more}", UserWarning, stacklevel=4
        )

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
        )
        traced = measure(traced, batch, show_progress=settings.show_progress).traced
        solution = self._solve(traced, batch)
        assert solution.schedule is not None
        module = apply(traced, solution.schedule)
        form = Prepared(traced=traced, solution=solution, module=module, verification=None)
        if settings.verify_steps:
            form = Prepared(traced=traced, solution=solution, module=module, verification=self._verify(form, batch))
        self._forms.insert(0, form)
        del self._forms[settings.most_shapes :]
        return form

    def _solve(self, traced: TracedStep, batch: Any) -> Solution:
        settings, graph = self._settings, traced.graph
        given = self._given(graph)
        limit, margin = self._limit(traced, batch, keeps_all=given is None or given.keeps_all)
        problem = Problem(
            graph=graph, budget_bytes=limit - margin, time_limit_s=settings.time_limit_s, in_place=settings.in_place
        )
        solution = solve(problem, given) if given else solve_if_needed(problem, settings.strategy, label=settings.label)
        if solution.status is not Status.FITS:
            raise OverBudget(_over_budget(solution, limit, margin))
        return solution

    def _limit(self, traced: TracedStep, batch: Any, *, keeps_all: bool) -> tuple[int, int]:
        """The budget in bytes, and what of it is kept free: nothing where the step fits it as it is.

        `keeps_all` says that running without any recomputation would be an answer.
        """
        graph, budget = traced.graph, self._settings.budget
        unplanned = lower(graph, Plan(), in_place=self._settings.in_place)
        peak_bytes = simulate(graph, unplanned).peak_bytes
        if budget == "auto":
            budget = auto_budget(graph, next(self._model.parameters()).device, torch.cuda)
        limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=peak_bytes)
        margin = _margin(graph, limit)
        if not keeps_all or not limit - margin < peak_bytes <= limit:
            return limit, margin
        # Too close to trust the prediction, and a needless plan would cost time: let the step itself say.
        measured_bytes = graph.start_bytes + self._measured_peak(traced, unplanned, batch)
        limit = parse_budget(budget, start_bytes=graph.start_bytes, peak_bytes=max(peak_bytes, measured_bytes))
        return limit, (0 if measured_bytes <= limit else _margin(graph, limit))

    def _measured_peak(self, traced: TracedStep, schedule: Schedule, batch: Any) -> int:
        """What the captured step really adds to memory when it runs `schedule`; everything is put back."""
        module = apply(traced, schedule)
        seen = observe(
            lambda b: traced.convention.call(module, b),
            self._model,
            self._optimizer,
            batch,
            steps=2,  # a first step may still make what later ones find there
            unread_gradients=[slot.tensor() for slot in traced.convention.dropped],
            generators=traced.generators,
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
            compare_gradients=not self._settings.free_gradients,
            steps=self._settings.verify_steps,
        )
        if not found.exact:
            raise VerificationError(
                f"the planned step differs from yours: {found}. Nothing was changed. Please report it with the model "
                "and optimizer; until then checkpoint(..., in_place=False) or another strategy may help"
            )
        return found


def _margin(graph: Graph, limit: int) -> int:
    return int(MARGIN * max(0, limit - graph.start_bytes))


def auto_budget(graph: Graph, device: torch.device, api: Any) -> int:
    """What the step may use of a GPU: what is live before it and what is free, less a share for fragmentation.

    `api` is torch.cuda, or a stand-in of it in tests.
    """
    if device.type != "cuda":
        raise BudgetError(f"budget 'auto' asks a GPU what is free, but the model is on {device}: say bytes or a share")
    free, total = api.mem_get_info(device)
    cached = api.memory_reserved(device) - api.memory_allocated(device)
    return int(graph.start_bytes + free + cached - FRAGMENTATION * total)


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


def _over_budget(solution: Solution, limit: int, margin: int) -> str:
    graph, found = solution.problem.graph, solution.timeline
    least = f"the smallest peak found is {human_bytes(found.peak_bytes)}" if found else solution.reason
    lowest = floor(graph)
    help_text = "a smaller batch"
    if lowest.nbytes < limit:
        help_text = f"another strategy or a longer time limit may get below it; {help_text} always does"
    needed = found.peak_bytes if found else lowest.nbytes
    enough = graph.start_bytes + math.ceil((needed - graph.start_bytes) / (1 - MARGIN))
    return (
        f"{solution.strategy}: no plan fits {human_bytes(limit)} ({human_bytes(margin)} of it kept free): {least}. "
        f"No plan at all can go under {lowest}. What would help: {help_text}, or a budget of at least "
        f"{enough} bytes ({human_bytes(enough)})"
    )
