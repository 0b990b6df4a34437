"""The first planned step of each way through Dynamo's graphs, held against the model as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from profiler.measuring.restoring import Touched
from profiler.tracing.joint import as_it_was, detached
from rewriter.proof import Observation, Verification, VerificationError, compare, observe
from rewriter.telling import warn_caller
from rewriter.ways.common import Refused
from rewriter.ways.compiled.comparison import ROUNDING, relative_difference
from rewriter.ways.compiled.routes import RouteKey
from rewriter.ways.rehearsal import BackwardError, Facts
from rewriter.ways.trials import trial

if TYPE_CHECKING:
    from rewriter.ways.compiled.session import EagerSession

# A prediction over several graphs that is off by more is told.
PEAK_ERROR = 0.02
# Runs before a proof, at most.
PRACTICE = 3
# So often a proof is tried for a route: data decide which one a step takes, and may lead each try by another.
MOST_TRIES = 4


OTHER_USE = (
    "the loss reads a tensor that the model keeps (in an attribute, say) and does not return, so that its step cannot "
    "be tried out: return it"
)


@contextmanager
def _told_of_other_use() -> Iterator[None]:
    try:
        yield
    except BackwardError as error:
        raise Refused(OTHER_USE) from error


class RouteProofs:
    """What is proven of a session's routes; `planned` and `as_dynamo_made_it` run the model on a batch."""

    def __init__(
        self, session: EagerSession, *, planned: Callable[[Any], Any], as_dynamo_made_it: Callable[[Any], Any]
    ) -> None:
        self._session = session
        self._planned = planned
        self._as_dynamo_made_it = as_dynamo_made_it
        self._proven: set[RouteKey] = set()
        self._tries = Counter[RouteKey]()
        self.verification: Verification | None = None
        self._said = ""

    @property
    def said(self) -> str:
        """What is known of the planned model's bits."""
        if not self._said or not self._unproven:
            return self._said
        ways = len(self._session.routes)
        return f"{self._said}; {len(self._unproven)} of {ways} ways that data decide on not, no proof was led there yet"

    @property
    def missing(self) -> set[RouteKey]:
        """The routes of which nothing is proven, and may yet be."""
        taken = self._session.times_taken  # one that does not come again needs no further try
        return {key for key in self._unproven if self._tries[key] < min(taken[key], MOST_TRIES)}

    @property
    def _unproven(self) -> set[RouteKey]:
        return set(self._session.routes) - self._proven

    def prove(self, model: nn.Module, facts: Facts, batch: Any) -> None:
        """Forward and backward as they were and planned, from the same state; everything is put back."""
        self._tries.update(self.missing)
        batch = detached(batch)
        touched = Touched(model=model, optimizer=None, step=model)

        def seen(function: Callable[[Any], Any]) -> Observation:
            return observe(partial(trial, function, model, facts), touched, batch, steps=1)

        eager = seen(lambda given: as_it_was(model, *given))
        self._practise(lambda: trial(self._planned, model, facts, batch), touched)
        planned = seen(self._planned)
        if not self._session.is_planned:
            raise Refused("Dynamo gave another graph at each of its calls, so that none came again to be planned")
        self._proven |= {key for key in (self._session.way_taken,) if key is not None}
        predicted = self._session.solution.timeline
        assert predicted is not None
        found = compare(eager, planned, predicted_peak_bytes=predicted.above_start_bytes)
        self.verification = found
        self._said = f"proven equal to the bit, steps: {found.steps}"
        if not found.exact:
            with self._session.unplanned():
                alone = seen(self._as_dynamo_made_it)
            self._tell_difference(found, eager, planned, alone)
        if found.prediction_error > PEAK_ERROR:
            warn_caller(f"the peak is above the prediction: {found}")

    def _practise(self, once: Callable[[], Any], touched: Touched) -> None:
        """Plans are made in a first run, which measures ops, and another graph may turn up there: runs until none does.

        Refused where that does not come to an end: nothing is measured, or compared, before.
        """
        uses = self._session.uses()
        for _ in range(PRACTICE):
            known, planned_before = set(self._session.routes), self._session.planned_calls
            with touched.kept(), _told_of_other_use():
                once()
            self._session.settle()
            self._refuse_other_use(uses)
            is_planned = self._session.planned_calls > planned_before
            if is_planned and known == set(self._session.routes):
                return
        raise Refused(
            "Dynamo gave another graph at every try of the proof, or none: something that the model reads changes from "
            "step to step (TORCH_LOGS=recompiles shows it)"
        )

    def _refuse_other_use(self, uses: dict[Any, Any]) -> None:
        """A trial goes backward from what the model returns: a loss that reads more of it cannot be tried out."""
        now = self._session.uses()
        if any(now[route] != used for route, used in uses.items()):
            raise Refused(OTHER_USE)

    def _tell_difference(
        self, found: Verification, eager: Observation, planned: Observation, alone: Observation
    ) -> None:
        """VerificationError where it is more than rounding; else a warning that says where, how much and why."""
        share = relative_difference(eager, planned)
        dynamo = compare(eager, alone, predicted_peak_bytes=0)
        if dynamo.exact:
            why = "with Dynamo alone it is equal: gradients of a tensor that several graphs read are summed otherwise"
        else:
            why = (
                f"Dynamo alone differs too, first in {dynamo.first_mismatch}, by {dynamo.largest_difference:g} at "
                "most: library code takes another path when it is traced"
            )
        said = (
            f"the planned model is not equal to yours to the bit: first in {found.first_mismatch}, by "
            f"{found.largest_difference:g} at most, {share:.1g} of the largest entry of its tensor; {why}"
        )
        if share > ROUNDING:
            raise VerificationError(f"{said}. Nothing was changed; prove=False goes on regardless")
        self._said = f"not equal to the bit: {found.first_mismatch} by {found.largest_difference:g}"
        warn_caller(said)
