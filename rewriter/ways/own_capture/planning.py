"""From one call of a model to a form of it: captured, measured, planned within the budget, proven."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.errors import FileFormatError
from planner.ir import Graph
from planner.plan import Plan
from planner.solve import Problem, Solution, Status, solve
from planner.units import human_bytes
from profiler.errors import CaptureError
from profiler.measuring.memory import allocator_of
from profiler.measuring.restoring import Touched
from profiler.tracing.calling_convention import BufferSlot, Convention, ReturnOut
from profiler.tracing.eager_ways.assumptions import Check
from profiler.tracing.joint import (
    OUTSIDE,
    OUTSIDE_NAME,
    ForwardAndBackward,
    detached,
    forward_of,
    joint_workload,
    kept_for_another_backward,
    with_facts,
)
from profiler.tracing.whole_step import TracedStep
from profiler.workload import device_of
from rewriter.agreement import ALONE, Ranks, agree
from rewriter.budgets import OverBudget, bounds_reserved, is_share, margin_bytes, margin_of_a_plan_bytes, over_budget
from rewriter.given_plan import GivenPlan
from rewriter.one_plan import ANOTHER_SEQUENCE, answer_of_all, for_own_sizes, overlapped
from rewriter.other_shapes import carried_over
from rewriter.pipeline import Limit, ReadyStep, budget_bytes, prepare, proven, why_not_proven
from rewriter.proof import Observation, Verification, VerificationError, compare, observe
from rewriter.reserving import Reserve
from rewriter.telling import warn_caller
from rewriter.ways.common import ModelSettings
from rewriter.ways.company import Company, open_bytes, open_count, solve_beside
from rewriter.ways.optimizer_steps import OptimizerSteps, elsewhere_bytes, gradient_bytes, nbytes_of
from rewriter.ways.own_capture.cutting import cut
from rewriter.ways.own_capture.form import ModelForm, forward_function
from rewriter.ways.rehearsal import BYTES_OF_A_LOSS, Call, Facts
from rewriter.ways.trials import trial

log = logging.getLogger("recompute_planner")


class Planner:
    """One call of the model on its way to a form."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        facts: Facts | None,
        settings: ModelSettings,
        *,
        steps: OptimizerSteps,
        company: Company,
        earlier: Sequence[Solution],
        ranks: Ranks = ALONE,
    ) -> None:
        self.model = model
        self.earlier = earlier  # plans of other shapes
        self.batch = detached(batch)
        self.known_facts = facts
        self.settings = settings
        self.steps = steps
        self.company = company
        self.ranks = ranks
        self.accumulating = Call.of(model, batch).accumulating
        self.usable_bytes = 0  # of the budget, once it is known

    def form(self, measured: Sequence[Graph]) -> ModelForm:
        """Captured, measured, planned and proven; OverBudget before anything is changed.

        A shape with the ops of one that was `measured` has its times from there, unless it needs more memory than that
        says.
        """
        form = self._prepared(measured)
        if form.measured is None and self._over_bytes(form) > 0:
            log.info("measured after all, because it needs more than the times and sizes of other shapes said")
            form = self._prepared(())
        self._warn_if_over(form)
        return form

    def _prepared(self, known_graphs: Sequence[Graph]) -> ModelForm:
        args, kwargs = self.batch
        known = self.known_facts
        workload = joint_workload(
            self.model,
            args,
            kwargs,
            used=known.used if known else None,
            layouts=dict(known.layouts) if known else {},
        )
        with torch.autograd.set_detect_anomaly(False):  # it looks at every gradient, and is no part of the model
            ready = prepare(
                workload,
                [self.settings.budget],
                in_place=self.settings.in_place,
                audited=self.settings.prove,
                show_progress=self.settings.show_progress,
                cache=self.settings.cache,
                access=self.settings.access,
                known=known_graphs,
                ranks=self.ranks,
            )
        with self.ranks.together("looking for what runs once"):
            self._refuse_what_runs_once(ready)
        assert isinstance(workload.train_step, ForwardAndBackward)
        self.facts = self._largest_facts(known or _assumed(workload.train_step, ready.traced))
        measured = None if ready.is_scaled else ready.graph
        ready = self._as_called(ready)
        with self.ranks.together("planning the model"):
            form = self._form(ready, self._roomy(ready, self._batches_to_come_bytes()), measured)
        agree(self.ranks, "the sequence of collectives", form.collectives, otherwise=ANOTHER_SEQUENCE)
        unbound = replace(ready, workload=workload._replace(batch=None))  # a batch is not kept alive
        return replace(self._proven(form), ready=unbound)

    def again(self, form: ModelForm, *, to_grow_bytes: int) -> ModelForm:
        """The same capture, planned for what other tensors take now; where it can be, they may grow by some bytes."""
        self.facts = form.facts
        return self._proven(self._form(form.ready, self._roomy(form.ready, to_grow_bytes), form.measured))

    def _proven(self, form: ModelForm) -> ModelForm:
        why_not = self._why_not_proven(form.ready)
        if why_not and self.settings.prove:
            warn_caller(f"this plan is unproven: {why_not}")
        with self.ranks.together("proving the planned model"):
            verification = None if why_not else self._verified(form)
        solution = proven(form.solution, verification, why_not=why_not)
        return replace(form, solution=solution, verification=verification)

    def _largest_facts(self, mine: Facts) -> Facts:
        """What callers do on all ranks: the same, and what they allocate at most."""
        seen = self.ranks.gathered("comparing what the loop does with the outputs", mine)
        agree(
            self.ranks,
            "what the loop does with the outputs",
            [sorted(mine.used), sorted(mine.held), mine.layouts],
            otherwise="run the same loop on every rank",
        )
        return replace(mine, outside_bytes=max(facts.outside_bytes for facts in seen))

    def _why_not_proven(self, ready: ReadyStep) -> str:
        mine = why_not_proven(ready, steps=1) if self.settings.prove else "prove=False"
        return next(filter(None, self.ranks.gathered("asking for memory to compare in", mine)), "")

    @staticmethod
    def _refuse_what_runs_once(ready: ReadyStep) -> None:
        """CaptureError where the forward leaves something behind in Python, or the backward looks at a value."""
        changes = ready.traced.convention.guards.changes
        if changes:
            raise CaptureError(
                f"its forward changes what a graph does not hold: {'; '.join(map(str, changes[:3]))}. Planned, it "
                "would do so once and never again"
            )
        nodes = list(ready.traced.module.graph.nodes)
        (turn,) = [i for i, node in enumerate(nodes) if node.target is OUTSIDE]
        if any(isinstance(node.target, Check) for node in nodes[turn:]):
            raise CaptureError("its backward looks at the value of a tensor, and may go another way the next time")

    def _as_called(self, ready: ReadyStep) -> ReadyStep:
        """The measured graph with what is known of the caller in it."""
        traced, convention = ready.traced, ready.traced.convention
        (output,) = traced.module.graph.find_nodes(op="output")
        position = {node: v for v, node in enumerate(traced.value_nodes)}
        step = ready.workload.train_step
        assert isinstance(step, ForwardAndBackward)
        first = _output_count(convention)
        let_go = {
            position[node]
            for slot, node in zip(convention.outputs, output.args[0], strict=True)
            if isinstance(slot, ReturnOut) and slot.leaf < first and step.computed[slot.leaf] not in self.facts.held
        }

        def as_called(graph: Graph) -> Graph:
            return with_facts(
                kept_for_another_backward(graph),
                let_go=let_go & set(traced.graph.outputs),
                outside_bytes=self.facts.outside_bytes,
                gradients_leave=self.accumulating,
            )

        called = replace(ready.measured, traced=replace(traced, graph=as_called(traced.graph)))
        return replace(ready, measured=called, common=None if ready.common is None else as_called(ready.common))

    def _roomy(self, ready: ReadyStep, spare_bytes: int) -> Solution:
        """A plan that leaves so much to what may still come, where there is one."""
        if self.ranks.size == 1:
            with suppress(OverBudget):
                return self._solved(ready, spare_bytes=spare_bytes)
        return self._solved(ready)

    def _solved(self, ready: ReadyStep, *, spare_bytes: int = 0) -> Solution:
        settings, graph = self.settings, ready.planned_on
        mine = elsewhere_bytes(self.model, self.batch, settings.optimizer) if settings.in_bytes else 0
        elsewhere = max(self.ranks.gathered("comparing what else is in memory", mine)) + spare_bytes
        mine = budget_bytes(graph, settings.budget, device_of(self.model), in_place=settings.in_place)
        total = min(self.ranks.gathered("comparing budgets", mine))
        if is_share(settings.budget):  # of the first batches: a smaller one may take as much
            total = max([total, *(solution.problem.budget_bytes for solution in self.earlier)])
        limit = total - elsewhere
        margin = margin_of_a_plan_bytes(graph, limit, in_place=settings.in_place)
        self.usable_bytes = total - margin // 2
        problem = Limit(
            nbytes=limit,
            margin_bytes=margin,
            allocator=allocator_of(device_of(self.model)),
            reserved=bounds_reserved(settings.budget),
        ).problem(graph, time_limit_s=settings.time_limit_s, in_place=settings.in_place)
        if settings.access is not None:
            problem = settings.access.offered_in(problem, at_a_time=1 + self.company.forwards)
        problem = replace(problem, reserves_ahead=settings.reserve is Reserve.ARENA)
        solution = solve_beside(problem, self._planned, self._beside_bytes, said=str(self.company))
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit, margin, elsewhere_bytes=elsewhere)
        if settings.in_bytes:
            self.steps.check_fits(self.batch, total_bytes=total, elsewhere_bytes=elsewhere)
        if self.ranks.size == 1:
            return solution
        turn = [op.id for op in graph.ops if op.target == OUTSIDE_NAME]
        return overlapped(for_own_sizes(solution, ready.graph), graph, barriers=turn)

    def _batches_to_come_bytes(self) -> int:
        """What the batches of other forwards take that will be alive beside this one, and are not there yet."""
        if not self.settings.in_bytes:
            return 0
        still_to_come = max(0, self.company.forwards - open_count())
        return still_to_come * nbytes_of(leaf for leaf in pytree.tree_leaves(self.batch) if isinstance(leaf, Tensor))

    def _most_elsewhere_bytes(self, solution: Solution) -> int:
        """What other tensors may take of a budget in bytes beside a plan; half of the margin stays the prediction's."""
        assert solution.timeline is not None
        if not self.settings.in_bytes:
            return 0
        return self.usable_bytes - solution.timeline.peak_bytes - self._beside_bytes(solution)

    def _beside_bytes(self, solution: Solution) -> int:
        """What of the budget is left to other forwards; a share is of one forward and its backward."""
        if is_share(self.settings.budget):
            return 0
        mine = max(open_bytes(), self.company.nbytes(solution, gradient_bytes=gradient_bytes(self.model)))
        return max(self.ranks.gathered("comparing what other forwards hold", mine))

    def _planned(self, problem: Problem) -> Solution:
        if self.ranks.size == 1:
            return self._answer(problem)
        return answer_of_all(self.ranks, problem, self._answer)

    def _answer(self, problem: Problem) -> Solution:
        given = self._given(problem.graph)
        return solve(problem, given) if given else carried_over(problem, self.earlier, self._planned_anew)

    def _planned_anew(self, problem: Problem) -> Solution:
        return self.settings.cache.solved(problem, self.settings.strategy, label=self.settings.label)

    def _given(self, graph: Graph) -> GivenPlan | None:
        """The plan from the file; a later form that does not match it is planned like any other."""
        if self.settings.plan_file is None:
            return None
        try:
            return GivenPlan(Plan.load(self.settings.plan_file, graph))
        except FileFormatError:
            if not self.earlier:
                raise
            return None

    def _form(self, ready: ReadyStep, solution: Solution, measured: Graph | None) -> ModelForm:
        step, convention = ready.workload.train_step, ready.traced.convention
        assert isinstance(step, ForwardAndBackward)
        assert step.template is not None
        assert solution.schedule is not None
        first = _output_count(convention)
        gradients = {
            i: slot.leaf - first
            for i, slot in enumerate(convention.outputs)
            if isinstance(slot, ReturnOut) and slot.leaf >= first
        }
        rest = [slot for i, slot in enumerate(convention.outputs) if i not in gradients]
        replayed = ready.replayed(solution.schedule)
        return ModelForm(
            ready=ready,
            facts=self.facts,
            solution=solution,
            halves=cut(replayed.module, gradients=list(gradients)),
            collectives=replayed.collectives,
            step=step,
            slots=tuple(slot for slot in rest if isinstance(slot, (ReturnOut, BufferSlot))),
            receivers=tuple(gradients.values()),
            measured=measured,
            beside_bytes=self._beside_bytes(solution),
            forward=forward_function(self.model),
            most_elsewhere_bytes=self._most_elsewhere_bytes(solution),
        )

    # -- proof ----------------------------------------------------------------------------------------------

    def _verified(self, form: ModelForm) -> Verification:
        assert form.solution.timeline is not None
        in_eager = form.ready.touched(self.batch).in_eager(form.ready.workload.train_step)
        eager = self._seen(lambda batch: forward_of(self.model, *batch), in_eager)
        planned = self._planned_seen(form)
        found = compare(eager, planned, predicted_peak_bytes=form.solution.timeline.above_start_bytes)
        if not found.exact:
            raise VerificationError(f"the planned model differs from yours: {found}. Nothing was changed.")
        return found

    def _seen(self, call: Callable[[Any], Any], touched: Touched) -> Observation:
        return observe(partial(trial, call, self.model, self.facts), touched, self.batch, steps=1)

    def _planned_seen(self, form: ModelForm) -> Observation:
        touched = form.ready.touched(self.batch)
        return self._seen(lambda batch: form.run(self.model, batch, on_backward=lambda _: None), touched)

    def _over_bytes(self, form: ModelForm) -> int:
        """By how much a form was, or now is, measured over its budget: what is kept free below it left aside.

        Nothing where gradients are added to: they go as they come then, and the trial holds them all.
        """
        if self.accumulating:
            return 0
        found, graph, budget = form.verification, form.ready.graph, form.solution.problem.budget_bytes
        peak = self._planned_seen(form).peak_bytes if found is None else found.measured_peak_bytes
        return graph.start_bytes + peak - budget - 2 * margin_bytes(graph, budget)

    def _warn_if_over(self, form: ModelForm) -> None:
        if form.verification is not None and self._over_bytes(form) > 0:
            over = form.ready.graph.start_bytes + form.verification.measured_peak_bytes
            over -= form.solution.problem.budget_bytes
            warn_caller(f"the planned model was measured at {human_bytes(over)} over its budget: {form.verification}")


def _assumed(step: ForwardAndBackward, traced: TracedStep) -> Facts:
    """What a caller does at most of whom nothing is known: holds every output, and computes a loss of the used ones."""
    turn = next(op for op in traced.graph.ops if op.target == OUTSIDE_NAME)
    tangent_bytes = sum(traced.graph.storages[s].nbytes for s in traced.graph.makes[turn.id])
    return Facts(
        used=frozenset(step.used),
        held=frozenset(step.computed),
        outside_bytes=BYTES_OF_A_LOSS * tangent_bytes,
        layouts=tuple(zip(step.used, step.layouts, strict=True)),
    )


def _output_count(convention: Convention) -> int:
    """How many tensors the model returns: the step returns them first, then gradients."""
    return convention.result.tree.children()[0].num_leaves
