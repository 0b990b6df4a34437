"""What a training loop does with a model's outputs, learned from a step that runs as it would have anyway."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from profiler.measuring.meters import Meter, Watch
from profiler.tracing.joint import Template, as_it_was


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the caller does between a forward and its backward. Outputs are counted among the tensors returned."""

    used: frozenset[int]  # outputs that get a gradient
    held: frozenset[int]  # outputs that are still there when the backward reaches the model
    outside_bytes: int  # what is allocated meanwhile at most: the loss, and what it saves


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
            accumulating=any(p.grad is not None for p in model.parameters() if p.requires_grad),
        )


class Rehearsal:
    """One forward of the model as it was, and its backward; `facts` are there once both are over."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._watch: Watch | None = None
        self._outputs: dict[int, weakref.ref[Tensor]] = {}
        self._used: set[int] = set()
        self._held: frozenset[int] = frozenset()

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns, with an eye on it."""
        self._watch = self._meter.watch()  # from here: what it has not seen made, it does not see go
        template, tensors = Template.of(as_it_was(model, args, kwargs))
        # Views: the model may use its own outputs too (logits in its loss), which is nothing that the caller does.
        outputs = [tensor.view_as(tensor) if tensor.requires_grad else tensor for tensor in tensors]
        self._outputs = {i: weakref.ref(output) for i, output in enumerate(outputs)}
        for i, output in enumerate(outputs):
            if output.requires_grad:
                output.register_hook(self._noting(i))  # type: ignore[no-untyped-call]
        self._mark()
        return template.filled(outputs)

    def _mark(self) -> None:
        if self._watch is not None:
            self._watch.mark()

    def _noting(self, index: int) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if not self._used:
                self._held = still_there(self._outputs)
                self._mark()
            self._used.add(index)

        return note

    def facts(self) -> Facts | None:
        """What was learned; None where no backward has reached the model."""
        watch, self._watch = self._watch, None
        rises = [0, 0] if watch is None else watch.end()
        if not self._used:
            return None
        return Facts(used=frozenset(self._used), held=self._held, outside_bytes=rises[1])


def still_there(outputs: Mapping[int, weakref.ref[Tensor]]) -> frozenset[int]:
    """Which of these tensors somebody holds."""
    return frozenset(i for i, output in outputs.items() if output() is not None)
