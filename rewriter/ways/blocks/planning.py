"""From a watched step of a model to a plan by blocks: chosen within the budget, proven, and measured."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from planner.errors import FileFormatError
from planner.ir import Graph
from planner.plan import Plan
from planner.scaling import in_proportion
from planner.simulator import unplanned
from planner.solve import Problem, Solution, Status, solve, solve_if_needed
from planner.units import human_bytes
from profiler.measuring.restoring import Touched
from profiler.tracing.joint import detached, forward_of
from profiler.workload import device_of
from rewriter.budgets import margin_of_a_plan_bytes, over_budget
from rewriter.given_plan import GivenPlan
from rewriter.pipeline import budget_bytes, proven
from rewriter.proof import Observation, Verification, VerificationError, compare, observe
from rewriter.telling import warn_caller
from rewriter.ways.blocks.coarse_graph import BlockGraph, block_graph
from rewriter.ways.blocks.form import BlockForm, Kind, sizes_of
from rewriter.ways.blocks.profile import BlockProfile, cuts
from rewriter.ways.blocks.recomputation import Buffer
from rewriter.ways.common import ModelSettings, Refused
from rewriter.ways.optimizer_steps import OptimizerSteps, elsewhere_bytes
from rewriter.ways.rehearsal import Facts
from rewriter.ways.trials import trial

log = logging.getLogger("recompute_planner")

MUCH_MORE = 1.25  # times what was watched: estimates are off by less than that
TRIES = 3  # plans for one form: each for less, by what the ones before were measured above their predictions


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A step that was watched."""

    profile: BlockProfile
    facts: Facts
    written: frozenset[Buffer]
    sizes: tuple[int, ...]  # of the tensors in its batch


class Planner:
    """One call of the model on its way to a form."""

    def __init__(
        self, model: nn.Module, batch: Any, rehearsed: Rehearsed, settings: ModelSettings, steps: OptimizerSteps
    ) -> None:
        self.model = model
        self.steps = steps
        self.batch = detached(batch)
        self.rehearsed = rehearsed
        self.settings = settings
        self.sizes = tuple(max(pair) for pair in zip(sizes_of(batch), rehearsed.sizes, strict=True))
        self.graphs = self._graphs()

    def _graphs(self) -> list[BlockGraph]:
        """The step as graphs of blocks, from few large ones to many small ones, at the size that is asked for."""
        pairs = zip(self.sizes, self.rehearsed.sizes, strict=True)
        factor = max((now / before for now, before in pairs if before), default=1.0)
        found = [block_graph(self.rehearsed.profile, blocks) for blocks in cuts(self.rehearsed.profile)]
        if not found:
            raise Refused(
                "there are no blocks to recompute: none of its modules keeps anything for its backward that could be "
                "computed again from what it is given"
            )
        factor = max(factor, self._growth(found[0].graph))
        return found if factor == 1.0 else [replace(g, graph=in_proportion(g.graph, factor)) for g in found]

    def _growth(self, watched: Graph) -> float:
        """By how much more this step takes than the one that was watched: data may decide on sizes."""
        if not self.settings.prove:
            return 1.0
        added_bytes = unplanned(watched, in_place=False).peak_bytes - watched.start_bytes
        growth = self.eager.peak_bytes / max(1, added_bytes)
        return growth if growth > MUCH_MORE else 1.0

    @cached_property
    def eager(self) -> Observation:
        """What the model as it was leaves behind, and its peak."""
        return self._seen(lambda batch: forward_of(self.model, *batch))

    def form(self, kind: Kind) -> BlockForm:
        """Planned and proven; planned for less where it was measured over the budget. OverBudget if nothing fits."""
        less_bytes = beyond_bytes = 0
        for _ in range(TRIES):
            chosen, solution, limit = self._solved(less_bytes, beyond_bytes)
            form = self._form(kind, chosen, solution)
            found = self._verified(form)
            form = replace(form, verification=found, solution=proven(solution, found, why_not="prove=False"))
            over_bytes = 0 if found is None else chosen.graph.start_bytes + found.measured_peak_bytes - limit
            if over_bytes <= 0:
                return form
            log.info("measured %s over the budget: planned again for less", human_bytes(over_bytes))
            assert found is not None
            beyond_bytes = max(beyond_bytes, found.measured_peak_bytes - found.predicted_peak_bytes)
            less_bytes = max(less_bytes + over_bytes, beyond_bytes)  # so that this plan no longer fits
        warn_caller(
            f"the model planned by blocks was measured {human_bytes(over_bytes)} over its budget of "
            f"{human_bytes(limit)}: {form.verification}. Its bytes are estimates; ask for less"
        )
        return form

    def _solved(self, less_bytes: int, beyond_bytes: int) -> tuple[BlockGraph, Solution, int]:
        """The cheapest plan that fits over all ways to take the model apart, and the budget in bytes.

        `less_bytes` are left free; by `beyond_bytes` plans before this one were measured above their predictions.
        """
        settings, answers = self.settings, list[tuple[BlockGraph, Solution]]()
        elsewhere = self._elsewhere_bytes()
        device, seconds = device_of(self.model), settings.time_limit_s / len(self.graphs)
        total = budget_bytes(self.graphs[0].graph, settings.budget, device)
        limit = total - elsewhere
        margin = margin_of_a_plan_bytes(self.graphs[0].graph, limit, in_place=False)
        given, usable = self._given(), limit - margin - less_bytes
        for blocks in [given[0]] if given else self.graphs:
            problem = Problem(graph=blocks.graph, budget_bytes=usable, time_limit_s=seconds, in_place=False)
            if given:
                answers.append((blocks, solve(problem, given[1])))
            else:
                answers.append((blocks, solve_if_needed(problem, settings.strategy, label=settings.label)))
        chosen, solution = min(answers, key=lambda answer: _rank(answer[1]))
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit, margin, elsewhere_bytes=elsewhere, beyond_bytes=beyond_bytes)
        if settings.in_bytes:
            there = elsewhere + self.rehearsed.profile.gradient_bytes
            self.steps.check_fits(self.batch, total_bytes=total, elsewhere_bytes=there)
        return chosen, solution, limit

    def _given(self) -> tuple[BlockGraph, GivenPlan] | None:
        """The plan from the file, with the graph that it was made for; what was measured may be another one's."""
        if self.settings.plan_file is None:
            return None
        said = ""
        for blocks in self.graphs:
            try:
                return blocks, GivenPlan(Plan.load(self.settings.plan_file, blocks.graph))
            except FileFormatError as error:
                said = str(error)
        warn_caller(f"blocks are chosen anew, because no step that was seen is the plan's: {said}")
        return None

    def _elsewhere_bytes(self) -> int:
        """What of a budget in bytes is taken by tensors that are no part of the model's step."""
        if not self.settings.in_bytes:
            return 0
        found = elsewhere_bytes(self.model, self.batch, self.settings.optimizer)
        return found - self.rehearsed.profile.gradient_bytes  # which the graph has among what is there at the start

    def _form(self, kind: Kind, chosen: BlockGraph, solution: Solution) -> BlockForm:
        assert solution.plan is not None
        dropped = dict.fromkeys(eviction.storage for eviction in solution.plan.evictions)
        return BlockForm(
            kind=kind,
            sizes=self.sizes,
            solution=solution,
            recomputed=tuple(chosen.blocks[s] for s in sorted(dropped) if s in chosen.blocks),
            calls_seen=Counter(call.path for call in self.rehearsed.profile.calls),
            written=set(self.rehearsed.written),
        )

    # -- proof ----------------------------------------------------------------------------------------------

    def _verified(self, form: BlockForm) -> Verification | None:
        if not self.settings.prove:
            return None
        assert form.solution.timeline is not None
        planned = self._seen(lambda batch: form.run(self.model, *batch))
        found = compare(self.eager, planned, predicted_peak_bytes=form.solution.timeline.above_start_bytes)
        if not found.exact:
            raise VerificationError(
                f"the model planned by blocks differs from yours: {found}. Nothing was changed. Recomputed were "
                f"{', '.join(block.name for block in form.recomputed[:3])}: does one of them keep state of its own, or "
                "draw from a generator that is none of torch's, Python's or numpy's?"
            )
        return found

    def _seen(self, call: Callable[[Any], Any]) -> Observation:
        own = (value for module in self.model.modules() for value in vars(module).values())
        generators = [value for value in own if isinstance(value, torch.Generator)]
        touched = Touched(model=self.model, optimizer=None, step=self.model, generators=generators)
        return observe(partial(trial, call, self.model, self.rehearsed.facts), touched, self.batch, steps=1)


def _rank(solution: Solution) -> tuple[bool, float, float]:
    """The order of answers: what fits first, then the cheapest; else the smallest peak."""
    timeline = solution.timeline
    if timeline is None:
        return True, float("inf"), float("inf")
    if solution.status is Status.FITS:
        return False, timeline.recompute_us, timeline.peak_bytes
    return True, timeline.peak_bytes, timeline.recompute_us
