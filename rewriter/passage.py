"""A planned model's forward and backward on the autograd tape: gradients leave it in stages, as they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlannerError
from profiler.ops import memory_of
from profiler.tracing.patches import below_autograd
from rewriter.cutting import Halves


class BackwardError(PlannerError):
    """A backward that the planned model was not prepared for; says what it saw and what to do."""


class Passage:
    """One forward of a planned model, and what its backward needs."""

    def __init__(self, halves: Halves, inputs: list[Any], *, trainable: Sequence[int], used: Sequence[int]) -> None:
        self.halves = halves
        self.inputs = inputs
        self.trainable = frozenset(trainable)
        self.used = tuple(used)
        self.others: list[Any] = []  # what is saved and no tensor
        self.places: list[bool] = []  # which entries of what is saved are tensors
        self.carried: list[Any] = []  # between stages of the backward
        self.unsaved: frozenset[int] = frozenset()  # returned, and not kept for the backward by the plan itself
        self.on_backward: Callable[[frozenset[int]], None] = lambda _: None  # told which outputs get gradients

    def through(self, wanted: Sequence[Tensor]) -> tuple[Any, ...]:
        """What the forward returns; on the tape, `wanted` get their gradients stage by stage."""
        token: Tensor | None = None
        stages = self.halves.stages
        for i in range(len(stages) - 1, 0, -1):
            token = _Handover.apply(self, i, token, *(wanted[k] for k in stages[i].gradients))  # type: ignore[no-untyped-call]
        first = [wanted[k] for k in stages[0].gradients]
        returned: tuple[Any, ...] = _Forward.apply(self, token, *first)  # type: ignore[no-untyped-call]
        return returned

    def forward(self) -> tuple[list[Any], list[Any]]:
        """Run the forward; what it returns, and all that the backward reads of it."""
        inputs, self.inputs = self.inputs, []
        with below_autograd():
            returned, saved = self.halves.forward(*inputs)
            given = {id(entry) for entry in inputs}
            # The caller's own tensor must not get a place on the tape: return another that shares its memory.
            returned = [tensor.detach() if id(tensor) in given else tensor for tensor in returned]
        kept = {memory_of(entry)._cdata for entry in saved if isinstance(entry, Tensor)}
        self.unsaved = frozenset(i for i, tensor in enumerate(returned) if memory_of(tensor)._cdata not in kept)
        return returned, [*saved, *(inputs[i] for i in self.halves.saved_inputs)]

    def split(self, saved: list[Any]) -> list[Tensor]:
        """The tensors of what is saved: they belong on the tape, which minds that nobody writes to them."""
        self.places = [isinstance(entry, Tensor) for entry in saved]
        self.others = [entry for entry in saved if not isinstance(entry, Tensor)]
        return [entry for entry in saved if isinstance(entry, Tensor)]

    def joined(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The inverse of `split`."""
        sources = {True: iter(tensors), False: iter(self.others)}
        return [next(sources[place]) for place in self.places]

    def backward(self, stage: int) -> list[Any]:
        """Run one stage; the gradients that it completes."""
        if torch.is_grad_enabled():
            raise BackwardError(
                "this backward is itself to be differentiated (create_graph=True), which a planned model cannot do: "
                "call uncheckpoint(model) first, or leave such a penalty to a model that is not planned"
            )
        carried, self.carried = self.carried, []
        with below_autograd():
            gradients, self.carried = self.halves.stages[stage].run(carried)
        return gradients

    def check(self, tangents: Sequence[Tensor | None]) -> None:
        """BackwardError where other outputs get a gradient than the plan was made for."""
        seen = tuple(i for i, tangent in enumerate(tangents) if tangent is not None and i in self.trainable)
        self.on_backward(frozenset(seen))
        if seen != self.used:
            raise BackwardError(
                f"gradients came back for outputs {list(seen)} of the model, and it was planned for {list(self.used)} "
                "(counted among the tensors that it returns). Nothing was changed: the next forward is planned for "
                "what was seen now; run this batch again"
            )


class _Forward(torch.autograd.Function):
    """The forward, and the first stage of the backward."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, token: Tensor | None, *wanted: Tensor) -> Any:
        returned, saved = passage.forward()
        ctx.passage = passage
        ctx.save_for_backward(*passage.split(saved))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(returned) if isinstance(t, Tensor) and i not in passage.trainable)
        )
        return tuple(returned)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        passage: Passage = ctx.passage
        passage.check(tangents)
        passage.carried = [*passage.joined(ctx.saved_tensors), *(tangents[i] for i in passage.used)]
        ctx.maybe_clear_saved_tensors()  # they are the stages' now, to let go of; unless the graph is retained
        return None, None, *passage.backward(0)


class _Handover(torch.autograd.Function):
    """A later stage of the backward: its token leads from the stage before, and costs nothing."""

    @staticmethod
    def forward(ctx: Any, passage: Passage, stage: int, token: Tensor | None, *wanted: Tensor) -> Tensor:
        ctx.passage, ctx.stage = passage, stage
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None) -> Any:
        return None, None, None, *ctx.passage.backward(ctx.stage)
