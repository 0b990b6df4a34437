"""The model door: forward and backward are planned in place, and the training loop stays the user's live Python."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import strategies
from planner.errors import PlannerError
from planner.ir import Graph
from planner.simulator import Timeline
from planner.solve import DEFAULT_TIME_LIMIT_S, Solution, Status, Strategy, solve_if_needed
from profiler.tracing.calling import BufferSlot, Convention, ReturnOut
from profiler.tracing.joint import (
    ForwardAndBackward,
    Template,
    as_it_was,
    joint_workload,
    kept_for_another_backward,
    wanted,
)
from profiler.workload import device_of
from rewriter.budgets import check_budget, over_budget
from rewriter.cutting import Halves, cut
from rewriter.passage import Passage
from rewriter.pipeline import Limit, ReadyStep, limit_of, prepare, proven
from rewriter.proof import Verification, VerificationError

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
    """One captured and planned form of the model: a shape of its inputs, and which outputs get gradients."""

    ready: ReadyStep
    solution: Solution
    limit: Limit
    halves: Halves
    template: Template
    trainable: tuple[int, ...]
    used: tuple[int, ...]
    returned_slots: tuple[ReturnOut | BufferSlot, ...]
    receivers: tuple[int, ...]  # per gradient that the backward makes: which of `wanted` it is for
    verification: Verification | None = None

    @property
    def convention(self) -> Convention:
        return self.ready.traced.convention

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward on the tape."""
        batch = (args, kwargs)
        passage = Passage(self.halves, self.convention.gather(batch), trainable=self.trainable, used=self.used)
        everything = wanted(model, batch)
        tensors = passage.through([everything[i] for i in self.receivers])
        by_leaf = dict(enumerate(self.convention.result.leaves[: self.output_count]))
        for slot, tensor in zip(self.returned_slots, tensors, strict=True):
            if isinstance(slot, BufferSlot):
                slot.owner._buffers[slot.key] = tensor
            else:
                by_leaf[slot.leaf] = tensor
        return self.template.filled([by_leaf[i] for i in range(self.output_count)])

    @property
    def output_count(self) -> int:
        """How many tensors the model returns."""
        return len(self.convention.result.leaves) - self.gradient_count

    @property
    def gradient_count(self) -> int:
        return self.convention.result.tree.children()[1].num_leaves


class PlannedModel:
    """What `model.planned` is: what was planned for a model, and the way into it.

    A copy of the model, or one that was saved and loaded, has none: it is the model as it was.
    """

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        self._forms: list[ModelForm] = []  # the most recently used first
        self._used: dict[Any, frozenset[int]] = {}  # by the structure of a call: which outputs got gradients

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
        if not torch.is_grad_enabled() or not wanted(model, (args, kwargs)):
            return as_it_was(model, args, kwargs)
        form = self._form_for(model, args, kwargs)
        return self._rehearsed(model, args, kwargs) if form is None else form(model, args, kwargs)

    def _form_for(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelForm | None:
        """The form that this call has, made where it has to be; None where it has to be rehearsed first."""
        key = _structure(model, args, kwargs)
        if key not in self._used:
            return None
        wrong: list[str] = []
        for i, form in enumerate(self._forms):
            found = form.convention.check((args, kwargs)) if frozenset(form.used) == self._used[key] else ["used"]
            if not found:
                if i:
                    self._forms.insert(0, self._forms.pop(i))
                return form
            wrong = wrong or found
        if self._forms:
            more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
            log.info("the model is captured and planned anew, because %s%s", "; ".join(wrong[:2]), more)
        self._forms.insert(0, self._prepared(model, args, kwargs, self._used[key]))
        del self._forms[self._settings.most_shapes :]
        return self._forms[0]

    # -- rehearsal ------------------------------------------------------------------------------------------

    def _rehearsed(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward of the model as it was, which learns what the caller does with its outputs."""
        template, tensors = Template.of(as_it_was(model, args, kwargs))
        key, used = _structure(model, args, kwargs), set[int]()
        # Views: the model may use its own outputs too (logits in its loss), which is nothing that the caller does.
        outputs = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        for i, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(self._noting(key, used, i))  # type: ignore[no-untyped-call]
        return template.filled(outputs)

    def _noting(self, key: Any, used: set[int], index: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            used.add(index)
            self._used[key] = frozenset(used)

        return note

    # -- plans ----------------------------------------------------------------------------------------------

    def _prepared(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], used: frozenset[int]
    ) -> ModelForm:
        settings = self._settings
        workload = joint_workload(model, args, kwargs, used=used)
        ready = prepare(workload, [settings.budget], show_progress=settings.show_progress)
        ready = _with_graph(ready, kept_for_another_backward(ready.graph))
        limit = limit_of(ready, settings.budget, in_place=True, keeps_all=ready.as_it_is)
        problem = limit.problem(ready.graph, time_limit_s=settings.time_limit_s, in_place=True)
        solution = solve_if_needed(problem, settings.strategy, label=settings.label)
        if solution.status is not Status.FITS:
            raise over_budget(solution, limit.nbytes, limit.margin_bytes)
        verification = self._verified(ready, solution, workload.batch)
        return _form(ready, proven(solution, verification, why_not="prove=False"), limit, verification)

    def _verified(self, ready: ReadyStep, solution: Solution, batch: Any) -> Verification | None:
        if not self._settings.prove:
            return None
        if not ready.as_it_is:
            warnings.warn("this plan is unproven: the model as it is does not fit in memory", UserWarning, stacklevel=6)
            return None
        assert solution.schedule is not None
        found = ready.proof(ready.replayed(solution.schedule), solution, batch, steps=1)
        if not found.exact:
            raise VerificationError(f"the planned model differs from yours: {found}. Nothing was changed")
        return found


def _form(ready: ReadyStep, solution: Solution, limit: Limit, verification: Verification | None) -> ModelForm:
    step, convention = ready.workload.train_step, ready.traced.convention
    assert isinstance(step, ForwardAndBackward)
    assert step.template is not None
    assert solution.schedule is not None
    first = convention.result.tree.children()[0].num_leaves
    is_gradient = [isinstance(slot, ReturnOut) and slot.leaf >= first for slot in convention.outputs]
    gradients = [i for i, yes in enumerate(is_gradient) if yes]
    leaves = [slot.leaf for slot in convention.outputs if isinstance(slot, ReturnOut) and slot.leaf >= first]
    kept = [slot for slot, yes in zip(convention.outputs, is_gradient, strict=True) if not yes]
    return ModelForm(
        ready=replace(ready, workload=ready.workload._replace(batch=None)),  # a batch is not kept alive
        solution=solution,
        limit=limit,
        halves=cut(ready.replayed(solution.schedule).module, gradients=gradients),
        template=step.template,
        trainable=step.trainable,
        used=step.used,
        returned_slots=tuple(slot for slot in kept if isinstance(slot, (ReturnOut, BufferSlot))),
        receivers=tuple(leaf - first for leaf in leaves),
        verification=verification,
    )


def _with_graph(ready: ReadyStep, graph: Graph) -> ReadyStep:
    return replace(ready, measured=replace(ready.measured, traced=replace(ready.traced, graph=graph)))


def _structure(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call looks like, apart from sizes: by it, what the caller does with the outputs is remembered."""
    return pytree.tree_structure((args, kwargs)), model.training


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
    check_budget(budget, device_of(model))
    _check_model(model)
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
