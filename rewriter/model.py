"""The model door: forward and backward are planned in place, and the training loop stays the user's live Python."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import strategies
from planner.errors import PlannerError
from planner.simulator import Timeline
from planner.solve import DEFAULT_TIME_LIMIT_S, Problem, Solution, Status, Strategy, solve_if_needed
from profiler.measuring.memory import live_bytes
from profiler.measuring.meters import meter_for
from profiler.tracing.calling import BufferSlot, Convention, ReturnOut
from profiler.tracing.joint import (
    ForwardAndBackward,
    Template,
    as_it_was,
    detached,
    joint_workload,
    kept_for_another_backward,
    wanted,
    with_facts,
)
from profiler.workload import device_of
from rewriter.budgets import check_budget, margin_bytes, over_budget
from rewriter.cutting import Halves, cut
from rewriter.passage import Passage
from rewriter.pipeline import ReadyStep, budget_bytes, prepare, proven
from rewriter.proof import Verification, VerificationError, compare, observe
from rewriter.rehearsal import Call, Facts, Rehearsal, still_there

log = logging.getLogger("recompute_planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What a planned model was asked for."""

    budget: str | int
    strategy: Strategy
    label: str
    time_limit_s: float
    prove: bool
    most_shapes: int
    show_progress: bool


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """One captured and planned form of the model: a shape of its inputs, and what the caller does with its outputs."""

    ready: ReadyStep
    facts: Facts
    solution: Solution
    halves: Halves
    template: Template
    trainable: tuple[int, ...]
    used: tuple[int, ...]
    output_count: int  # tensors that the model returns
    returned_slots: tuple[ReturnOut | BufferSlot, ...]
    receivers: tuple[int, ...]  # per gradient that the backward makes: which of `wanted` it is for
    verification: Verification | None = None

    @property
    def convention(self) -> Convention:
        return self.ready.traced.convention

    def run(self, model: nn.Module, batch: Any, *, on_backward: Callable[[Any], None]) -> Any:
        """A forward on the tape; `on_backward` is told which outputs are still there when the backward begins."""
        everything = wanted(model, batch)
        passage = Passage(self.halves, self.convention.gather(batch), trainable=self.trainable, used=self.used)
        tensors = passage.through([everything[i] for i in self.receivers])
        by_leaf = dict(enumerate(self.convention.result.leaves[: self.output_count]))
        for slot, tensor in zip(self.returned_slots, tensors, strict=True):
            if isinstance(slot, BufferSlot):
                slot.owner._buffers[slot.key] = tensor
            else:
                by_leaf[slot.leaf] = tensor
        outputs = [by_leaf[i] for i in range(self.output_count)]
        # What the plan keeps for the backward is there in any case.
        watched = {i: weakref.ref(output) for i, output in enumerate(outputs) if i in passage.unsaved}
        passage.on_backward = lambda seen: on_backward((seen, still_there(watched)))
        return self.template.filled(outputs)


class PlannedModel:
    """What `model.planned` is: what was planned for a model, and the way into it.

    A copy of the model, or one that was saved and loaded, has none: it is the model as it was.
    """

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        self._forms: list[ModelForm] = []  # the most recently used first
        self._facts: dict[Call, Facts] = {}
        self._rehearsing: tuple[Call, Rehearsal] | None = None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    # -- what it will tell ----------------------------------------------------------------------------------

    @property
    def form(self) -> ModelForm:
        """The form used last; PlannerError before the first planned step."""
        if not self._forms:
            raise PlannerError("nothing is planned yet: the second training step does that, with its own batch")
        return self._forms[0]

    @property
    def solution(self) -> Solution:
        """The plan of the form used last: predicted peak and time, and a reason for every tensor."""
        return self.form.solution

    @property
    def verification(self) -> Verification | None:
        """What the proof of the form used last found."""
        return self.form.verification

    def timeline(self) -> Timeline:
        """Bytes at every step of the schedule, and the predicted time."""
        assert self.solution.timeline is not None
        return self.solution.timeline

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        return self.solution.explain(text)

    def save(self, path: str | Path) -> None:
        """Write the plan used last to a file."""
        assert self.solution.plan is not None
        self.solution.plan.save(path, self.solution.problem.graph)

    # -- the way in -----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: planned where a backward can follow, as it was everywhere else."""
        model = self._model()
        assert model is not None
        batch = (args, kwargs)
        self._learn()
        if not torch.is_grad_enabled() or not wanted(model, batch):
            return as_it_was(model, args, kwargs)
        call = Call.of(model, batch)
        if call not in self._facts:
            rehearsal = Rehearsal(meter_for(device_of(model)))
            self._rehearsing = call, rehearsal
            return rehearsal.forward(model, args, kwargs)
        form = self._form_for(model, batch, self._facts[call])
        return form.run(model, batch, on_backward=lambda seen: self._check_facts(call, *seen))

    def _learn(self) -> None:
        """What the rehearsal has seen, if one is over."""
        if self._rehearsing is None:
            return
        (call, rehearsal), self._rehearsing = self._rehearsing, None
        facts = rehearsal.facts()
        if facts is not None:
            self._facts[call] = facts

    def _check_facts(self, call: Call, used: frozenset[int], held: frozenset[int]) -> None:
        """Notice a caller who does something else than was seen at first: the next forward is planned for that."""
        known = self._facts[call]
        if used == known.used and held <= known.held:
            return
        if not held <= known.held:
            warnings.warn(
                f"outputs {sorted(held - known.held)} of the planned model are held until its backward, which was not "
                "so when it was planned: this step may need more memory than predicted; the next one is planned anew",
                UserWarning,
                stacklevel=2,
            )
        self._facts[call] = replace(known, used=used, held=known.held | held)

    def _form_for(self, model: nn.Module, batch: Any, facts: Facts) -> ModelForm:
        wrong: list[str] = []
        for i, form in enumerate(self._forms):
            found = form.convention.check(batch) if form.facts == facts else ["the caller does something else with it"]
            if not found:
                if i:
                    self._forms.insert(0, self._forms.pop(i))
                return form
            wrong = wrong or found
        if self._forms:
            log.info("the model is captured and planned anew, because %s", "; ".join(wrong[:2]))
        self._forms.insert(0, _Planner(model, batch, facts, self._settings).form())
        del self._forms[self._settings.most_shapes :]
        return self._forms[0]


# -- from a call to a plan ----------------------------------------------------------------------------------------


class _Planner:
    """One call of the model on its way to a form."""

    def __init__(self, model: nn.Module, batch: Any, facts: Facts, settings: ModelSettings) -> None:
        self.model = model
        self.batch = detached(batch)
        self.facts = facts
        self.settings = settings
        self.accumulating = Call.of(model, batch).accumulating

    def form(self) -> ModelForm:
        """Captured, measured, planned and proven; OverBudget before anything is changed."""
        args, kwargs = self.batch
        workload = joint_workload(self.model, args, kwargs, used=self.facts.used)
        ready = prepare(
            workload,
            [self.settings.budget],
            audited=self.settings.prove,
            show_progress=self.settings.show_progress,
        )
        ready = self._as_called(ready)
        form = self._form(ready, self._solved(ready))
        verification = self._verified(form)
        solution = proven(form.solution, verification, why_not="prove=False")
        unbound = replace(ready, workload=workload._replace(batch=None))  # a batch is not kept alive
        return replace(form, ready=unbound, solution=solution, verification=verification)

    def _as_called(self, ready: ReadyStep) -> ReadyStep:
        """The measured graph with what is known of the caller in it."""
        traced, convention = ready.traced, ready.traced.convention
        (output,) = traced.module.graph.find_nodes(op="output")
        position = {node: v for v, node in enumerate(traced.value_nodes)}
        first = _output_count(convention)
        let_go = {
            position[node]
            for slot, node in zip(convention.outputs, output.args[0], strict=True)
            if isinstance(slot, ReturnOut) and slot.leaf < first and slot.leaf not in self.facts.held
        }
        graph = with_facts(
            kept_for_another_backward(traced.graph),
            let_go=let_go & set(traced.graph.outputs),
            outside_bytes=self.facts.outside_bytes,
            gradients_leave=self.accumulating,
        )
        return replace(ready, measured=replace(ready.measured, traced=replace(traced, graph=graph)))

    def _solved(self, ready: ReadyStep) -> Solution:
        settings, graph = self.settings, ready.graph
        elsewhere = self._elsewhere_bytes()
        limit = budget_bytes(graph, settings.budget, device_of(self.model)) - elsewhere
        margin = margin_bytes(graph, limit)
        problem = Problem(graph=graph, budget_bytes=limit - margin, time_limit_s=settings.time_limit_s)
        solution = solve_if_needed(problem, settings.strategy, label=settings.label)
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit, margin, elsewhere_bytes=elsewhere)
        return solution

    def _elsewhere_bytes(self) -> int:
        """What of a budget in bytes is taken by tensors that are no part of the model's step: optimizer state, others.

        A share of what the step adds has nothing to do with them, and what is free leaves them out already.
        """
        budget = self.settings.budget
        if isinstance(budget, str) and (budget.rstrip().endswith("%") or budget == "auto"):
            return 0
        own = [*self.model.parameters(), *self.model.buffers()]
        own += [leaf for leaf in pytree.tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        return live_bytes(device_of(self.model), without=own)

    def _form(self, ready: ReadyStep, solution: Solution) -> ModelForm:
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
        return ModelForm(
            ready=ready,
            facts=self.facts,
            solution=solution,
            halves=cut(ready.replayed(solution.schedule).module, gradients=list(gradients)),
            template=step.template,
            trainable=step.trainable,
            used=step.used,
            output_count=first,
            returned_slots=tuple(slot for slot in rest if isinstance(slot, (ReturnOut, BufferSlot))),
            receivers=tuple(gradients.values()),
        )

    # -- proof ----------------------------------------------------------------------------------------------

    def _verified(self, form: ModelForm) -> Verification | None:
        if not self.settings.prove:
            return None
        if not form.ready.as_it_is:
            warnings.warn("this plan is unproven: the model as it is does not fit in memory", UserWarning, stacklevel=6)
            return None
        assert form.solution.timeline is not None
        touched = form.ready.touched(self.batch)
        calls: list[Callable[[Any], Any]] = [
            lambda batch: as_it_was(self.model, *batch),
            lambda batch: form.run(self.model, batch, on_backward=lambda _: None),
        ]
        eager, planned = (observe(partial(self._trial, call), touched, self.batch, steps=1) for call in calls)
        found = compare(eager, planned, predicted_peak_bytes=form.solution.timeline.above_start_bytes)
        if not found.exact:
            raise VerificationError(
                f"the planned model differs from yours: {found}. Nothing was changed. {form.ready.other_path}"
            )
        return found

    def _trial(self, call: Callable[[Any], Any], batch: Any) -> list[Tensor | None]:
        """Forward and backward as the caller does them: outputs (or, of those that are let go, digests), gradients."""
        _, tensors = Template.of(call(batch))
        shown: list[Tensor | None] = [t if i in self.facts.held else digest(t) for i, t in enumerate(tensors)]
        loss = _Seed.apply(*(tensors[i] for i in sorted(self.facts.used)))  # type: ignore[no-untyped-call]
        del tensors
        return shown + list(torch.autograd.grad(loss, wanted(self.model, batch), allow_unused=True))


class _Seed(torch.autograd.Function):
    """A loss that holds nothing of the outputs, and sends ones back to them."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(o.shape, o.stride(), o.dtype, o.device) for o in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty_strided(size, stride, dtype=dtype, device=device).fill_(1)
            for size, stride, dtype, device in ctx.like
        )


DIGESTED_AT_ONCE = 2**12


def digest(tensor: Tensor) -> Tensor:
    """A number that differs where any bit does, all but surely; made in little memory."""
    words = tensor.detach().contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(words, DIGESTED_AT_ONCE):
        factors = torch.arange(1, len(piece) + 1, dtype=torch.int64, device=tensor.device) * 0x9E3779B1
        total = total * 0x5851F42D + ((piece.to(torch.int64) + 1) * (factors ^ (factors >> 15))).sum()
    return total


def _output_count(convention: Convention) -> int:
    """How many tensors the model returns: the step returns them first, then gradients."""
    return convention.result.tree.children()[0].num_leaves


# -- the door -----------------------------------------------------------------------------------------------------


def checkpoint_model(
    model: nn.Module,
    *,
    budget: str | int,
    strategy: str | Strategy = "auto",
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    prove: bool = True,
    most_shapes: int = 8,
    show_progress: bool = False,
) -> nn.Module:
    """Plan a model's forward and backward in place, for any training loop; returns the model.

    Nothing happens now: the first training step runs as it would have, to see what the loop does with the outputs; the
    second is captured, measured, planned within `budget`, and proven equal to the bit (`prove`). `model.planned` tells
    about it, and `uncheckpoint(model)` puts the model back.
    """
    chosen = strategies.make(strategy) if isinstance(strategy, str) else strategy
    _check_model(model)
    check_budget(budget, device_of(model))
    settings = ModelSettings(
        budget=budget,
        strategy=chosen,
        label=strategy if isinstance(strategy, str) else strategy.name,
        time_limit_s=time_limit_s,
        prove=prove,
        most_shapes=most_shapes,
        show_progress=show_progress,
    )
    planned = PlannedModel(model, settings)
    model._compiled_call_impl = planned
    model.__dict__["planned"] = planned
    return model


def uncheckpoint(model: nn.Module) -> nn.Module:
    """The model as it was before `checkpoint_model`."""
    if not isinstance(model.__dict__.get("planned"), PlannedModel):
        raise PlannerError("this model is not planned: there is nothing to undo")
    model._compiled_call_impl = None
    del model.__dict__["planned"]
    return model


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PlannerError(f"checkpoint_model takes a model, not a {type(model).__name__}")
    if isinstance(model.__dict__.get("planned"), PlannedModel):
        raise PlannerError("this model is planned already: uncheckpoint(model) first, then plan it anew")
    if model._compiled_call_impl is not None or type(model).__name__ == "OptimizedModule":
        raise PlannerError("this model is compiled: plan the model itself, before torch.compile")
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise PlannerError("this model has no parameters: there is nothing to train, so nothing to plan")
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise PlannerError(f"this model lies on several devices ({named}), and a plan is made for one: move it to one")
