"""The way of the model door by Dynamo's graphs and eager's kernels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from planner.solve import Solution
from planner.units import parse_budget
from profiler.errors import CaptureError
from profiler.measuring.restoring import Touched
from profiler.tracing.eager_ways.eager_path import answers_of_eager
from profiler.tracing.fake_tensors.patches import Patch, generator_states_of_all, patched, python_of, restore_generators
from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.guards import Reach
from profiler.tracing.joint import Template, as_it_was, detached
from profiler.workload import NoOptimizer
from rewriter.budgets import OverBudget
from rewriter.proof import Verification
from rewriter.telling import warn_caller
from rewriter.ways.common import ModelSettings, Refused
from rewriter.ways.compiled.comparison import ROUNDING, difference_of
from rewriter.ways.compiled.proving import RouteProofs
from rewriter.ways.compiled.way import CompiledWay
from rewriter.ways.optimizer_steps import OptimizerSteps, elsewhere_bytes
from rewriter.ways.rehearsal import Call, Facts, stop_watching
from rewriter.ways.trials import digest

if TYPE_CHECKING:
    from rewriter.ways.compiled.session import EagerSession

# A model that breaks into more graphs in one forward is not worth being nested.
MOST_CALLS = 64
# So many steps without a plan, and the next way is asked.
MOST_UNPLANNED = 4


class DynamoWay(CompiledWay):
    """Dynamo's graphs, each with forward and backward traced over the autograd engine, under one plan."""

    promise = (
        "eager's bits where the proof finds them, and where not, it says by how much; a peak within 2% of the "
        "prediction where the model breaks into several graphs; plans that serve any size"
    )

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        from rewriter.ways.compiled.session import EagerSession  # which loads Dynamo

        self._session = EagerSession(settings)
        super().__init__(model, settings, self._session.compiled)
        self._steps = OptimizerSteps(model)
        self._facts: dict[Call, Facts] = {}
        self._watched: list[tuple[Call, _Outputs]] = []
        self._steps_unplanned = 0
        self._expected: list[Tensor] | None = None  # what a step that is rehearsed should return
        self._proofs = RouteProofs(self._session, planned=self._run, as_dynamo_made_it=self._on_eagers_path)

    @property
    def session(self) -> EagerSession:
        """All that is known of the model's graphs."""
        return self._session

    @property
    def solution(self) -> Solution:
        """The plan used last."""
        return replace(self._session.solution, proof=self._proofs.said or "unproven: prove=False")

    @property
    def verification(self) -> Verification | None:
        """What the last proof found."""
        return self._proofs.verification

    def _in_training(self, model: nn.Module, batch: Any) -> Any:
        self._steps.forward_begins()
        call = Call.of(model, batch)
        if self._session.is_between_steps:
            self._learn()
            self._refuse_if_nothing_comes_of_it()
            self._mind_the_optimizer(model, batch)
            if call in self._facts and self.settings.prove and self._proofs.missing:
                self._prove(model, call, batch)
        if call in self._facts:
            return self._run(batch)
        return self._rehearsed(model, call, batch)

    def _prove(self, model: nn.Module, call: Call, batch: Any) -> None:
        """The proof, which makes the plans.

        Several graphs hand gradients over one by one, which takes memory: where nothing fits, another way still may.
        """
        try:
            self._proofs.prove(model, self._facts[call], batch)
        except OverBudget as error:
            if all(len(key.graphs) == 1 for key in self._session.routes):
                raise
            raise Refused(str(error)) from error

    # -- running --------------------------------------------------------------------------------------------

    def _run(self, batch: Any) -> Any:
        before = self._session.calls
        result = self._on_eagers_path(batch)
        if self._session.calls == before:
            self._tell_no_graph()
        return result

    def _on_eagers_path(self, batch: Any) -> Any:
        with on_eagers_path():
            return self._through_dynamo(batch)

    def _tell_no_graph(self) -> None:
        warn_caller(
            "Dynamo gave no graph of this training step, which therefore ran unplanned: what changes from step to step "
            "may have exceeded its limit of recompilations (TORCH_LOGS=recompiles shows it)"
        )

    def _rehearsed(self, model: nn.Module, call: Call, batch: Any) -> Any:
        """The first step of its kind: graphs run as Dynamo made them, and it is noted what the caller does."""
        before = self._session.calls
        if self._session.is_between_steps:
            stop_watching()  # another model's watch, which would be cut inside of this call, and blind this step
        # Held until the step was watched to its end: what goes meanwhile would count as given back by it.
        self._expected = self._returned_as_it_was(model, batch) if self.settings.prove else None
        with put_back_if_refused(model):
            result = self._on_eagers_path(batch)
            if self._session.calls == before:
                raise Refused("Dynamo gave no graph that a backward could go through")
            template, tensors = _taken_apart(result)
            if self._expected is not None and (share := _apart(self._expected, tensors)) > ROUNDING:
                raise Refused(
                    f"with Dynamo alone, before anything is planned, it returns something else: by {share:.1g} of the "
                    "largest entry of a tensor. Something that it does is not the same when it is traced"
                )
        outputs = _Outputs(tensors)
        self._watched.append((call, outputs))
        views = outputs.tensors()
        self._session.note_returned(views)
        return template.filled(views)

    @staticmethod
    def _returned_as_it_was(model: nn.Module, batch: Any) -> list[Tensor]:
        """What the model as it is returns; everything is put back."""
        with Touched(model=model, optimizer=None, step=model).kept(), torch.no_grad():
            _, tensors = _taken_apart(as_it_was(model, *detached(batch)))
            return [tensor.detach().clone() for tensor in tensors]

    def _learn(self) -> None:
        self._session.settle()
        self._expected = None
        for call, outputs in self._watched:
            if outputs.used:
                self._facts[call] = outputs.facts()
        self._watched.clear()
        if self._session.refusal:
            raise Refused(self._session.refusal)
        longest = max((len(key.graphs) for key in self._session.routes), default=0)
        if longest > MOST_CALLS:
            raise Refused(
                f"one step goes through {longest} graphs of Dynamo's, more than the {MOST_CALLS} that are nested"
            )

    def _refuse_if_nothing_comes_of_it(self) -> None:
        """A few steps without any plan are enough: another way may take the model."""
        self._steps_unplanned = 0 if self._session.planned_calls else self._steps_unplanned + 1
        if self._steps_unplanned > MOST_UNPLANNED:
            raise Refused(
                f"Dynamo gave another graph at each of {MOST_UNPLANNED} steps, so that none was planned: something "
                "that the model reads changes from step to step (TORCH_LOGS=recompiles shows it)"
            )

    def _mind_the_optimizer(self, model: nn.Module, batch: Any) -> None:
        """Plans leave room for its state, and OverBudget where its own step does not fit."""
        if self._steps.outgrow(self.settings):
            self._session.plan_anew()
        if self.settings.in_bytes and self._steps.for_a_moment_bytes:
            elsewhere = elsewhere_bytes(model, batch, self.settings.optimizer)
            total = parse_budget(self.settings.budget, start_bytes=0, peak_bytes=0)
            self._steps.check_fits(batch, total_bytes=total, elsewhere_bytes=elsewhere)

    def undo(self) -> None:
        self._steps.close()


class _Outputs:
    """The tensors that a model returned: which get a gradient, and which are held until then."""

    def __init__(self, tensors: list[Tensor]) -> None:
        # Views: a graph may go on with the very tensors that the caller gets.
        self._tensors = [t.view_as(t) if t.requires_grad else t for t in tensors]
        self._refs = [weakref.ref(t) for t in self._tensors]
        self.used: dict[int, Layout] = {}  # outputs with a gradient, and how that lies in memory
        self.held: frozenset[int] = frozenset()
        for i, tensor in enumerate(self._tensors):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, i))  # type: ignore[no-untyped-call]

    def tensors(self) -> list[Tensor]:
        """The tensors, once: afterwards only the caller has them."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def _note(self, i: int, gradient: Tensor) -> None:
        if not self.used:
            self.held = frozenset(k for k, ref in enumerate(self._refs) if ref() is not None)
        self.used[i] = Layout.of(gradient)

    def facts(self) -> Facts:
        """What the caller did with them."""
        return Facts(used=frozenset(self.used), held=self.held, outside_bytes=0, layouts=tuple(self.used.items()))


def _taken_apart(returned: Any) -> tuple[Template, list[Tensor]]:
    try:
        return Template.of(returned)
    except CaptureError as error:
        raise Refused(str(error)) from error


def _apart(expected: list[Tensor], actual: list[Tensor]) -> float:
    """The largest difference of two lists of tensors, relative to the largest entry of its tensor."""
    if [t.shape for t in expected] != [t.shape for t in actual]:
        return float("inf")
    # Digests first: they take little memory, and somebody may be watching that.
    unequal = [(a, b.detach()) for a, b in zip(expected, actual, strict=True) if not digest(a).equal(digest(b))]
    return max((difference_of(a, b) for a, b in unequal), default=0.0)


@contextmanager
def on_eagers_path() -> Iterator[None]:
    """Inside, libraries that ask whether they are traced are told no, while Dynamo traces and whenever it checks."""
    # Asked by libraries once they are told that nobody compiles; Dynamo cannot trace the answer, which it has here.
    capturing: list[Patch] = [
        (device, "is_current_stream_capturing", _no) for device in (torch.cuda, torch.xpu) if not device.is_available()
    ]
    with answers_of_eager(), patched(capturing):
        yield


def _no() -> bool:
    return False


@contextmanager
def put_back_if_refused(model: nn.Module) -> Iterator[None]:
    """Where the inside is refused, all is as before but for what cannot be: another way runs the same call again."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = generator_states_of_all()
    put_back, reach = python_of(model.modules()), Reach(model, model, NoOptimizer())
    try:
        yield
    except Refused:
        reach.trials.put_back()
        put_back()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_generators(states)
        raise
