"""What those ways share that keep several plans of a model, each for calls of its own kind: forms."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from planner.errors import PlannerError
from planner.solve import Solution
from profiler.tracing.joint import as_it_was, forward_of, in_place_of_forward, is_trained, is_transformed
from profiler.tracing.ranks.torch_shards import RootGathers
from rewriter.other_shapes import kept
from rewriter.proof import Verification
from rewriter.ways.common import ModelSettings, PlannedWay
from rewriter.ways.optimizer_steps import OptimizerSteps


class PlannedForm(Protocol):
    """One plan of a model, for calls of one kind."""

    @property
    def solution(self) -> Solution:
        """The plan."""

    @property
    def verification(self) -> Verification | None:
        """What its proof found."""


F = TypeVar("F", bound=PlannedForm)


class WayOfForms(PlannedWay, Generic[F]):
    """Plans a model form by form, in the place of its forward: hooks on the model itself run around it as ever."""

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        super().__init__(model, settings)
        self._forms: list[F] = []  # the most recently used first
        self._steps = OptimizerSteps(model)

    @property
    def form(self) -> F:
        """The form used last; PlannerError before the first planned step."""
        if not self._forms:
            raise PlannerError(
                "nothing is planned yet: the training step after the one that is watched does that, with its own batch"
            )
        return self._forms[0]

    @property
    def solution(self) -> Solution:
        """The plan of the form used last: predicted peak and time, and a reason for every tensor."""
        return self.form.solution

    @property
    def verification(self) -> Verification | None:
        """What the proof of the form used last found."""
        return self.form.verification

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: planned where a backward can follow, as it was everywhere else."""
        gathers = RootGathers(self.model)
        with gathers.aside(), in_place_of_forward(self.model, partial(self._with_gathers, gathers)):
            return as_it_was(self.model, args, kwargs)

    def _with_gathers(self, gathers: RootGathers, *args: Any, **kwargs: Any) -> Any:
        with gathers.back():
            return self._forward(self.model, *args, **kwargs)

    def _forward(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch = (args, kwargs)
        if not torch.is_grad_enabled() or not is_trained(model, batch) or is_transformed(batch):
            return forward_of(model, args, kwargs)
        self._steps.forward_begins()
        if self._steps.outgrow(self.settings):
            self._forms.clear()
        return self._in_training(model, batch)

    @abstractmethod
    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        """A forward that a backward can follow; `batch` is `(args, kwargs)`."""

    def _keep(self, form: F) -> None:
        """A form more, the one used last; those used longest ago go where there are too many."""
        self._forms = kept(
            [form, *self._forms],
            lambda form: form.solution.problem.graph,
            most=self.settings.most_shapes,
            most_bytes=self.settings.most_forms_bytes,
        )

    def undo(self) -> None:
        self._steps.close()
