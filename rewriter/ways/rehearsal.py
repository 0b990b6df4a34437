"""What a training loop does with a model's outputs, learned from a step that runs as it would have anyway."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from planner.errors import PlannerError
from planner.units import human_bytes
from profiler.errors import CaptureError
from profiler.measuring.memory import OutOfMemory, available_bytes
from profiler.measuring.meters import Meter, Watch, is_inside_of_a_cut
from profiler.tracing.fake_tensors.patches import generator_states_of_all, restore_generators
from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.joint import Template, as_it_was, given, parameters_of, passed_on
from profiler.tracing.ranks.torch_distributed import local
from profiler.workload import device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the caller does between a forward and its backward. Outputs are counted among the tensors returned."""

    used: frozenset[int]  # outputs that get a gradient
    held: frozenset[int]  # outputs that are still there when the backward reaches the model
    outside_bytes: int  # what is allocated meanwhile at most: the loss, and what it saves
    layouts: tuple[tuple[int, Layout], ...] = ()  # how gradients of outputs lie in memory; like the outputs if not said


@dataclass(frozen=True, slots=True)
class Call:
    """What a call looks like, apart from sizes: what the caller does with the outputs is remembered by it."""

    structure: pytree.TreeSpec
    training: bool
    accumulating: bool  # parameters have a `.grad` when the forward begins

    @staticmethod
    def of(model: nn.Module, batch: Any) -> Call:
        """The call of `model` with `batch`, which is `(args, kwargs)`."""
        return Call(
            structure=pytree.tree_structure(batch),
            training=model.training,
            accumulating=any(p.grad is not None for p in parameters_of(model) if p.requires_grad and p.is_leaf),
        )


ModelCall = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]


class Watching(Protocol):
    """Somebody who may be watching memory."""

    is_cut: bool  # whether the watch has ended where no other may begin at once

    def stop(self) -> None:
        """End the watch, if there is one."""


_watching: list[Watching] = []  # at most one; its watch is ended whatever becomes of its model


def begin_watching(somebody: Watching) -> bool:
    """Nobody else watches from now on: a device is watched once at a time, and no watch ends inside of a backward.

    False where `somebody` must not begin now either: a watch was cut here.
    """
    was_cut = stop_watching()
    _watching.append(somebody)
    return not was_cut and not is_inside_of_a_cut()


def stop_watching() -> bool:
    """End the watch of whoever has one; whether it was cut."""
    for somebody in list(_watching):
        somebody.stop()
    was_cut = any(somebody.is_cut for somebody in _watching)
    _watching.clear()
    return was_cut


atexit.register(stop_watching)  # a profiler that runs when the interpreter ends brings the process down


class BackwardError(PlannerError):
    """A backward that the planned model was not prepared for; says what it saw and what to do."""


def refuse_second_derivative() -> None:
    """BackwardError in a backward that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise BackwardError(
            "this backward is itself to be differentiated (create_graph=True), which a planned model cannot do: "
            "call uncheckpoint(model) first, or leave such a penalty to a model that is not planned"
        )


class Rehearsal:
    """One forward of the model as it was, and its backward; `facts` are there once both are over.

    `call` is how the model is called. Without a meter nobody asks for the bytes outside. A backward that is itself to
    be differentiated is refused, unless the plan to come `differentiates_twice`.
    """

    def __init__(self, meter: Meter | None, *, call: ModelCall = as_it_was, differentiates_twice: bool = False) -> None:
        self._meter = meter
        self._call = call
        self._differentiates_twice = differentiates_twice
        self._is_differentiated = False  # the backward itself: it frees nothing, so that nothing is learned from it
        self._watch: Watch | None = None
        self.is_cut = False
        self._rises: list[int] | None = None  # per span: forward, the caller, backward
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._layouts: dict[int, Layout] = {}
        self._gradient_bytes = 0
        self._held: frozenset[int] = frozenset()
        self._tape: weakref.ref[_Tape] | None = None  # as long as a backward can come
        self.refusal = ""  # why nothing can be learned of what the model returns
        self.keeps_graph = False  # the backward leaves what was saved for another (retain_graph=True)

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, with an eye on it; OutOfMemory, and all put back, where its backward would not fit.

        From here on: what a watch has not seen made, it does not see go.
        """
        if self._meter is not None and begin_watching(self):
            self._watch = self._meter.watch()
        there = given(model, (args, kwargs))
        with _stopped_short(model):
            returned = self._call(model, args, kwargs)
        try:
            template, tensors = Template.of(returned)
        except CaptureError as error:  # the step has been, and is what it is: it is told at the next one
            self.refusal = str(error)
            self.stop()
            return returned
        passed, tape = passed_on(tensors, there), _Tape()
        self._tape = weakref.ref(tape)
        outputs = [t if i in passed or not t.requires_grad else self._seen(t, i, tape) for i, t in enumerate(tensors)]
        self._outputs = {i: weakref.ref(output) for i, output in enumerate(outputs) if i not in passed}
        self._mark()
        return template.filled(outputs)

    def _seen(self, tensor: Tensor, index: int, tape: _Tape) -> Tensor:
        """Another tensor for the caller: the model may use its own too (logits in its loss)."""
        seen: Tensor = _Seen.apply(tensor, partial(self._note, index, tape))  # type: ignore[no-untyped-call]
        return seen

    def _note(self, index: int, _: _Tape, gradient: Tensor) -> None:
        if not self._differentiates_twice:
            refuse_second_derivative()
        self._is_differentiated |= torch.is_grad_enabled()
        self.keeps_graph |= is_graph_kept()
        if not self._layouts:
            self._held = still_there(self._outputs)
            self._mark()
        self._layouts[index] = Layout.of(gradient)
        self._gradient_bytes += gradient.numel() * gradient.element_size()

    def _mark(self) -> None:
        if self._watch is not None:
            self._watch.mark()

    def stop(self) -> None:
        """End the watch, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._rises = watch.end()
            self.is_cut = watch.is_cut

    @property
    def is_over(self) -> bool:
        """Whether a backward has reached the model."""
        return bool(self._layouts)

    @property
    def is_open(self) -> bool:
        """Whether a backward can still come."""
        return not self.is_over and self._tape is not None and self._tape() is not None

    def facts(self, *, estimated: bool = False) -> Facts | None:
        """What was learned; None where no backward has reached the model, or one that is itself differentiated.

        Nor where something else took the watch away, unless the bytes outside are to be `estimated` then.
        """
        self.stop()
        if not self.is_over or self._is_differentiated:
            return None
        outside_bytes = BYTES_OF_A_LOSS * self._gradient_bytes if self._meter is not None else 0
        if self._rises is not None and len(self._rises) >= 3:
            outside_bytes = self._rises[1]
        elif self._meter is not None and not estimated:
            return None
        return Facts(
            used=frozenset(self._layouts),
            held=self._held,
            outside_bytes=outside_bytes,
            layouts=tuple(sorted(self._layouts.items())),
        )


def is_graph_kept() -> bool:
    """Whether the backward that runs now leaves what was saved for another one (retain_graph=True)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


# What a loss allocates at most, as a multiple of what it is computed from: a softmax, a gradient, a copy.
BYTES_OF_A_LOSS = 3


class _Tape:
    """Held by the graph behind what a forward returned, and by nothing else."""


class _Seen(torch.autograd.Function):
    """The same tensor with a place of its own on the tape, and no view of the other: it may be written to."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note(gradient)
        return gradient, None


def still_there(outputs: Mapping[int, weakref.ref[Tensor]]) -> frozenset[int]:
    """Which of these tensors somebody holds."""
    return frozenset(i for i, output in outputs.items() if output() is not None)


# Of what could be had before a forward: kept free for what its backward allocates beside gradients.
KEPT_FREE = 0.1


@contextmanager
def _stopped_short(model: nn.Module) -> Iterator[None]:
    """OutOfMemory as soon as a forward leaves too little for its backward, with buffers and generators put back."""
    device = device_of(model)
    missing = [local(p) for p in model.parameters() if p.requires_grad and p.grad is None]
    gradients = sum(part.numel() * part.element_size() for part in missing)
    needed = gradients + KEPT_FREE * available_bytes(device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    generators = generator_states_of_all()

    def check(*_: Any) -> None:
        there = available_bytes(device)
        if there < needed:
            raise OutOfMemory(
                f"the forward leaves {human_bytes(there)} on {device}, too little for its backward "
                f"({human_bytes(gradients)} of gradients alone)"
            )

    handle = register_module_forward_hook(check)
    try:
        yield
    except OutOfMemory:
        restore_generators(generators)
        with torch.no_grad():
            for buffer, copy in buffers:
                buffer.copy_(copy)
        raise
    finally:
        handle.remove()
