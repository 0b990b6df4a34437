"""The way of the model door by inductor's kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner.errors import PlannerError
from planner.solve import Solution
from profiler.measuring.restoring import Touched
from profiler.tracing.joint import Template, as_it_was, detached
from rewriter.proof import Observation, Verification, VerificationError, compare, observe
from rewriter.telling import warn_caller
from rewriter.ways.common import ModelSettings
from rewriter.ways.compiled.comparison import ROUNDING, relative_difference
from rewriter.ways.compiled.way import CompiledWay
from rewriter.ways.rehearsal import Facts
from rewriter.ways.trials import trial

if TYPE_CHECKING:
    from rewriter.ways.compiled.inductor import InductorSession

log = logging.getLogger("recompute_planner")

# So many times what plain inductor differs from eager by, the planned code may.
TIMES_PLAIN = 8
# Or so many roundings of the numbers' type, where inductor happens to be equal.
ROUNDINGS = 32


class InductorWay(CompiledWay):
    """Dynamo's graphs compiled by inductor; the plan decides what each forward saves."""

    promise = (
        "inductor's arithmetic, not eager's bits: as near to them as inductor's own plain code is, which is tried out; "
        "what is saved is planned, the peak is measured and not promised"
    )

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        from rewriter.ways.compiled.inductor import InductorSession  # which loads Dynamo and inductor

        self._session = InductorSession(settings)
        super().__init__(model, settings, self._session.compiled)
        self._verification: Verification | None = None
        self._steps = 0
        self.differences: Differences | None = None

    @property
    def session(self) -> InductorSession:
        """All that is known of the model's graphs."""
        return self._session

    @property
    def solution(self) -> Solution:
        """The plan of the largest graph."""
        proof = "unproven: prove=False" if not self.settings.prove else str(self.differences or "not compared yet")
        return replace(self._session.solution, proof=proof)

    @property
    def verification(self) -> Verification | None:
        """The measured peak of the second step beside eager's, and the largest difference."""
        return self._verification

    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        self._steps += 1
        if self._steps == 2 and self.settings.prove:
            self._measure(model, batch)
        result = self._through_dynamo(batch)
        if not self._session.planned:
            raise PlannerError(
                "inductor was given no graph with a backward, so that nothing is planned: leave kernels='inductor' out"
            )
        return result

    def _measure(self, model: nn.Module, batch: Any) -> None:
        """One step of eager's and one of inductor's from the same state; everything is put back."""
        batch, touched = detached(batch), Touched(model=model, optimizer=None, step=model)
        with touched.kept():
            _, tensors = Template.of(self._through_dynamo(batch))
            used = frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad)
        del tensors
        facts = Facts(used=used, held=used, outside_bytes=0)  # held: so that they are compared by more than digests
        plain = self._given_to_dynamo("inductor")
        calls: list[Callable[[Any], Any]] = [
            lambda given: as_it_was(model, *given),
            self._through_dynamo,
            lambda given: plain(*given[0], **given[1]),
        ]
        with touched.kept():  # compiled before it is watched
            trial(calls[-1], model, facts, batch)
        eager, ours, inductors = (
            observe(partial(trial, call, model, facts), touched, batch, steps=1) for call in calls
        )
        predicted = self._session.solution.timeline
        assert predicted is not None
        self._verification = compare(eager, ours, predicted_peak_bytes=predicted.above_start_bytes)
        self.differences = Differences.of(eager, ours=ours, plain=inductors)
        log.info("inductor beside eager: %s; %s", self._verification, self.differences)
        self._judge(self.differences)

    @staticmethod
    def _judge(found: Differences) -> None:
        """VerificationError where the plan changes more than inductor does; a warning where nothing can be said."""
        if found.plain > ROUNDING:
            warn_caller(
                f"{found}: plain inductor's is no rounding (it draws its own random numbers), so that the planned code "
                "cannot be held against eager"
            )
        elif found.ours > found.tolerance:
            raise VerificationError(f"the planned model is not inductor's: {found}. prove=False goes on regardless")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """From eager, in outputs, gradients and buffers: the largest, relative to the largest entry of its tensor."""

    ours: float
    plain: float  # inductor's own, without a plan
    eps: float  # of the coarsest type that is compared

    @staticmethod
    def of(eager: Observation, *, ours: Observation, plain: Observation) -> Differences:
        """Both, of three observations of one step."""
        types = {tensor.dtype for tensor in eager.tensors.values() if tensor.is_floating_point()}
        return Differences(
            ours=relative_difference(eager, ours),
            plain=relative_difference(eager, plain),
            eps=max((torch.finfo(dtype).eps for dtype in types), default=0.0),
        )

    @property
    def tolerance(self) -> float:
        """Other kernels round otherwise: some times inductor's own difference, and at least some roundings."""
        return max(TIMES_PLAIN * self.plain, ROUNDINGS * self.eps)

    def __str__(self) -> str:
        return (
            f"from eager it differs by {self.ours:.1g} of the largest entry of a tensor, plain inductor by "
            f"{self.plain:.1g} (tolerance {self.tolerance:.1g})"
        )
