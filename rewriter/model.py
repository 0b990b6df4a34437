"""The model door: forward and backward are planned in place, and the training loop stays the user's live Python."""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from planner.errors import PlannerError
from planner.host_link import HostLink
from planner.simulator import Timeline
from planner.solve import DEFAULT_TIME_LIMIT_S, Solution, Strategy
from profiler.errors import CaptureError
from profiler.measuring.meters import is_watched_elsewhere
from profiler.measuring.restoring import Touched
from profiler.tracing.joint import as_it_was
from profiler.tracing.ranks.replicated import planned_part, refuse_shards
from profiler.tracing.ranks.tensor_parallel import is_in_parts
from profiler.tracing.ranks.torch_shards import refuse_part_of_shards, reshard
from profiler.workload import device_of
from rewriter.budgets import OverBudget
from rewriter.other_shapes import MOST_FORMS_BYTES
from rewriter.proof import Verification
from rewriter.settings import read_settings
from rewriter.telling import warn_caller
from rewriter.ways.blocks.way import BlockWise
from rewriter.ways.common import Kernels, ModelSettings, PlannedWay, Refused, Way
from rewriter.ways.compiled.dynamo_way import DynamoWay
from rewriter.ways.compiled.inductor_way import InductorWay
from rewriter.ways.own_capture.way import OwnCapture

# The ways that compute with each kind of kernels, the best promise first: where one refuses a model, the next is taken.
# A way belongs here and nowhere else; kernels without any way are told as unknown.
WAYS: dict[Kernels, tuple[type[PlannedWay], ...]] = {
    Kernels.EAGER: (OwnCapture, DynamoWay, BlockWise),
    Kernels.INDUCTOR: (InductorWay,),
}

# Those of them that take sizes as symbols: `dynamic=True` begins with these.
OF_ANY_SIZE: frozenset[Way] = frozenset({Way.DYNAMO, Way.BLOCKS})


def ways_for(kernels: Kernels, *, dynamic: bool | None) -> tuple[type[PlannedWay], ...]:
    """The ways to try, in their order."""
    ways = WAYS[kernels]
    first = tuple(way for way in ways if dynamic and way.way in OF_ANY_SIZE)
    return first or ways


_inside: ContextVar[bool] = ContextVar("inside of a planned model's call", default=False)

# Forwards in several threads take turns: what traces, watches or measures one is there once in a process.
_one_at_a_time = threading.RLock()


class PlannedModel:
    """What `model.planned` is: what was planned for a model, by whichever way, and the way into it.

    A copy of the model, or one that was saved and loaded, has none: it is the model as it was.
    """

    steps_aside: ClassVar[bool] = True  # inside of another planned model

    def __init__(self, model: nn.Module, settings: ModelSettings) -> None:
        self._model = weakref.ref(model)
        self._settings = settings
        first, *self._others = ways_for(settings.kernels, dynamic=settings.dynamic)
        self._refusals: list[tuple[Way, str]] = []
        self._over_budget: OverBudget | None = None  # of a way that had no plan small enough
        self._taken = first(model, settings)

    def __repr__(self) -> str:
        try:
            told = str(self.solution)
        except PlannerError as error:  # nothing is planned yet, and when it will be
            told = str(error)
        return f"planned by {self.way.value}: {told}"

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: planned where a backward can follow, as it was everywhere else."""
        model = self._model()
        assert model is not None
        if _inside.get():  # of another planned model, whose plan has this one's part in it
            return as_it_was(model, args, kwargs)
        self._check_shards(model)
        if is_watched_elsewhere() and torch.is_grad_enabled():
            warn_caller(
                "this forward runs unplanned: it is called from another thread than the main one, whose last step is "
                "still being watched. A forward of a planned model in the main thread ends that"
            )
            return as_it_was(model, args, kwargs)
        with _one_at_a_time:
            token = _inside.set(True)
            try:
                return self._by_a_way(*args, **kwargs)
            finally:
                _inside.reset(token)

    def _check_shards(self, model: nn.Module) -> None:
        """CaptureError for shards by a way in which each rank would choose alone what all must gather."""
        if self.way is not Way.OWN_CAPTURE:
            refuse_shards(model, by=self.way.value)
        refuse_part_of_shards(model)
        reshard(model)

    def _by_a_way(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return self._taken(*args, **kwargs)
            except Refused as refusal:
                if self._is_the_models_own(refusal, args, kwargs):
                    return as_it_was(self._existing(), args, kwargs)  # raises it, as it would have
                self._take_next(refusal)

    def _existing(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    def _is_the_models_own(self, refusal: Refused, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model itself raises what a way was stopped by: a bad batch says nothing about the way."""
        own = _first_cause(refusal)
        model = self._existing()
        if isinstance(own, PlannerError) or is_in_parts(model):  # whose forward no rank can try alone
            return False
        touched = Touched(model=model, optimizer=None, step=model, is_eager=True)
        try:
            with touched.kept(), touched.watched(), torch.no_grad():
                as_it_was(model, args, kwargs)
        except type(own):
            return True
        return False

    def _take_next(self, refusal: Refused) -> None:
        """The next way, with a word about it; CaptureError with the reasons of all where there is none."""
        self._refusals.append((self.way, str(refusal)))
        self._over_budget = self._over_budget or _over_budget(refusal)
        self._others = [way for way in self._others if way.way not in refusal.also]
        if not self._others and self._over_budget is not None:
            raise self._over_budget from refusal
        if not self._others:
            said = "; ".join(f"{way.value}: {why}" for way, why in self._refusals)
            raise CaptureError(
                f"this model cannot be planned ({said}). Nothing was changed: plan a part of it that does none of "
                "this, checkpoint_model(part, budget=...), or the whole step, checkpoint(train_step, model, optimizer, "
                "batch, budget=...)"
            ) from refusal
        model = self._existing()
        self._taken.undo()
        taken = self._others.pop(0)
        refuse_shards(model, by=taken.way.value, because=str(refusal))
        lost = f"; without {' and '.join(named)}" if (named := self._settings.of_own_capture) else ""
        warn_caller(
            f"this model is planned by {taken.way.value} and not by {self.way.value}, which refused it: {refusal}. "
            f"Promised now: {taken.promise}{lost}"
        )
        self._taken = taken(model, self._settings)

    # -- what it will tell ----------------------------------------------------------------------------------

    @property
    def taken(self) -> PlannedWay:
        """The way in use, with whatever it alone can tell."""
        return self._taken

    @property
    def way(self) -> Way:
        """How the model is planned: the first way that did not refuse it."""
        return self._taken.way

    @property
    def promise(self) -> str:
        """What holds of bits and bytes."""
        return self._taken.promise

    @property
    def refusals(self) -> tuple[tuple[Way, str], ...]:
        """The ways that did not take the model, and why."""
        return tuple(self._refusals)

    @property
    def solution(self) -> Solution:
        """The plan used last: predicted peak and time, and a reason for every tensor."""
        return self._taken.solution

    @property
    def verification(self) -> Verification | None:
        """What the proof of the plan used last found; None where there was none."""
        return self._taken.verification

    def timeline(self) -> Timeline:
        """Bytes at every step of the schedule, and the predicted time."""
        return self._taken.timeline()

    def explain(self, text: str = "") -> str:
        """What was kept, dropped, why and at what cost, for every tensor whose name or module contains `text`."""
        return self._taken.explain(text)

    def save(self, path: str | Path) -> None:
        """Write the plan used last to a file that `checkpoint_model(..., plan=path)` reads; `.csv`: for people."""
        self._taken.save(path)


def _over_budget(refusal: Refused) -> OverBudget | None:
    return refusal.__cause__ if isinstance(refusal.__cause__, OverBudget) else None


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def checkpoint_model(
    model: nn.Module,
    *,
    budget: str | int,
    strategy: str | Strategy = "auto",
    optimizer: Optimizer | None = None,
    kernels: str = "eager",
    dynamic: bool | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    plan: str | Path | None = None,
    prove: bool = True,
    in_place: bool = True,
    most_shapes: int | None = None,
    most_forms_bytes: int = MOST_FORMS_BYTES,
    cache_dir: str | Path | None = None,
    host_link: str | float | HostLink | None = None,
    offload_dir: str | Path | None = None,
    host_budget: str | int | None = None,
    reserve: str | None = None,
    show_progress: bool = False,
) -> nn.Module:
    """Plan a model's forward and backward in place, for any training loop; returns the model.

    Nothing happens now: the first training step runs as it would have, to see what the loop does with the outputs; the
    second is captured, measured, planned within `budget`, and proven equal to the bit (`prove`). `model.planned` tells
    about it, and `uncheckpoint(model)` puts the model back. `optimizer` is the one that will step the model: what its
    state and its step take counts in a budget in bytes from the first plan on. `plan` is a file that
    `model.planned.save` wrote, used instead of a strategy; `cache_dir` is a folder that keeps what was measured and
    planned for the next start. `kernels` are eager's, or inductor's where a way has them;
    `dynamic=True` begins with the ways whose plans serve any size. `host_link`, `offload_dir` and `host_budget` are as
    for `checkpoint`: by the first way, own capture, a plan may also move tensors to the host. So is `reserve`, by the
    same way.
    """
    whole, model = model, planned_part(model)
    _check_model(model)
    _check_options(optimizer=optimizer, dynamic=dynamic)
    settings = read_settings(
        ModelSettings,
        device_of(model),
        budget=budget,
        strategy=strategy,
        optimizer=optimizer,
        kernels=_kernels(kernels),
        dynamic=dynamic,
        time_limit_s=time_limit_s,
        plan=plan,
        saved_by="model.planned.save",
        prove=prove,
        in_place=in_place,
        most_shapes=most_shapes,
        most_forms_bytes=most_forms_bytes,
        show_progress=show_progress,
        cache_dir=cache_dir,
        host_link=host_link,
        offload_dir=offload_dir,
        host_budget=host_budget,
        reserve=reserve,
    )
    if settings.of_own_capture and ways_for(settings.kernels, dynamic=dynamic)[0] is not OwnCapture:
        named = settings.of_own_capture[0]
        raise PlannerError(f"{named} is for own capture alone: leave kernels and dynamic as they are, or it out")
    planned = PlannedModel(model, settings)
    model._compiled_call_impl = planned
    whole.__dict__["planned"] = model.__dict__["planned"] = planned
    return whole


def uncheckpoint(model: nn.Module) -> nn.Module:
    """The model as it was before `checkpoint_model`."""
    whole, model = model, planned_part(model)
    planned = model.__dict__.get("planned")
    if not isinstance(planned, PlannedModel):
        raise PlannerError("this model is not planned: there is nothing to undo")
    planned.taken.undo()
    del model._compiled_call_impl, model.__dict__["planned"]
    whole.__dict__.pop("planned", None)
    return whole


def _kernels(name: str) -> Kernels:
    known = [kernels.value for kernels in WAYS]
    if name not in known:
        raise PlannerError(f"kernels={name!r}: there are {', '.join(map(repr, known))}")
    return Kernels(name)


def _check_options(*, optimizer: object, dynamic: object) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise PlannerError(f"optimizer={optimizer!r}: give the torch.optim.Optimizer that will step the model, or None")
    if dynamic not in (True, False, None):
        raise PlannerError(f"dynamic={dynamic!r}: there are True, False and None")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PlannerError(f"checkpoint_model takes a model, not a {type(model).__name__}")
    if isinstance(model.__dict__.get("planned"), PlannedModel):
        raise PlannerError("this model is planned already: uncheckpoint(model) first, then plan it anew")
    if model._compiled_call_impl is not None or type(model).__name__ == "OptimizedModule":
        raise PlannerError("this model is compiled: plan the model itself, before torch.compile")
    if isinstance(model, torch.jit.ScriptModule):
        raise PlannerError("this model is compiled by TorchScript: plan the model that it was made from")
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise PlannerError("this model has no parameters: there is nothing to train, so nothing to plan")
    if len(devices) > 1:
        named = ", ".join(sorted(map(str, devices)))
        raise PlannerError(f"this model lies on several devices ({named}), and a plan is made for one: move it to one")
