"""One captured and planned form of a model, and how a call runs through it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.ir import Graph
from planner.solve import Solution
from profiler.tracing.calling_convention import BufferSlot, Convention, ReturnOut
from profiler.tracing.eager_ways.assumptions import BrokenAssumption
from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.joint import (
    ForwardAndBackward,
    given,
    wanted,
    without_saving_hooks,
)
from rewriter.pipeline import ReadyStep
from rewriter.proof import Verification
from rewriter.ways.company import held_bytes
from rewriter.ways.own_capture.cutting import Halves
from rewriter.ways.own_capture.passage import Passage
from rewriter.ways.rehearsal import Facts, still_there


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """One captured and planned form of the model: a shape of its inputs, and what the caller does with its outputs."""

    ready: ReadyStep
    facts: Facts
    solution: Solution
    halves: Halves
    step: ForwardAndBackward  # what it found the model to return
    slots: tuple[ReturnOut | BufferSlot, ...]  # where each tensor goes that the forward returns
    receivers: tuple[int, ...]  # per gradient that the backward makes: which of `wanted` it is for
    measured: Graph | None  # as it was measured; None where its times are another shape's
    collectives: tuple[str, ...] = ()  # what it sends to other ranks and waits for, in order
    beside_bytes: int = 0  # of the budget, left free for other forwards
    forward: Any = None  # the function that was traced as the model's own forward
    most_elsewhere_bytes: int = 0  # of a budget in bytes, what other tensors may take at most
    verification: Verification | None = None

    @property
    def convention(self) -> Convention:
        return self.ready.traced.convention

    def mismatches(self, batch: Any) -> list[str]:
        """What is not as this form assumes; empty where it may run."""
        if forward_function(self.convention.model) is not self.forward:
            return ["the model's forward was replaced by another"]
        with without_saving_hooks():  # what the plan saves goes through them, as what the model saves would
            return self.convention.check(batch)

    def broken(self, batch: Any) -> list[BrokenAssumption]:
        """The reads that now give another value, if it is only they that keep this form from running."""
        convention = self.convention
        with without_saving_hooks():
            others = forward_function(convention.model) is not self.forward or any(
                convention.guards.mismatches(convention.optimizer, batch)
            )
            return [] if others else convention.broken(batch)

    @cached_property
    def _passage(self) -> Callable[[list[Any]], Passage]:
        """What makes a passage of flat inputs."""
        computed = self.step.computed
        names = [computed[slot.leaf] if isinstance(slot, ReturnOut) else -1 for slot in self.slots]
        return partial(
            Passage,
            self.halves,
            names=names,
            trainable=tuple(i for i, name in enumerate(names) if name in self.step.trainable),
            used=tuple(names.index(name) for name in self.step.used),
            layouts=self.step.layouts,
            held_bytes=held_bytes(self.solution),
            watched=self.ready.ranks.watched,
        )

    @cached_property
    def _parameters(self) -> list[Tensor]:
        """Those that get a gradient: the very ones that were captured, which `mismatches` sees to."""
        return wanted(self.convention.model, ())

    def _wanted(self, batch: Any) -> list[Tensor]:
        given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        return [*self._parameters, *(leaf for leaf in given if leaf.requires_grad)]

    def run(
        self,
        model: nn.Module,
        batch: Any,
        *,
        on_backward: Callable[[Seen], None],
        on_forward: Callable[[Passage], None] = lambda _: None,
    ) -> Any:
        """A forward on the tape; `on_backward` is told what the caller did with the outputs when the backward begins.

        BrokenAssumption where the data lead another way than when this form was captured; all is put back then.
        """
        everything = self._wanted(batch)
        passage = self._passage(self.convention.gather(batch))
        tensors = passage.through([everything[i] for i in self.receivers])
        on_forward(passage)
        leaves, computed = self.convention.result.leaves, self.step.computed
        outputs = {position: leaves[leaf] for leaf, position in enumerate(computed)}
        if self.step.passed_on:
            there = given(model, batch)
            outputs |= {position: there[where] for position, where in self.step.passed_on.items()}
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if isinstance(slot, BufferSlot):
                slot.owner._buffers[slot.key] = tensor
            else:
                outputs[computed[slot.leaf]] = tensor
        # What the plan keeps for the backward is there in any case.
        kept_anyway = {passage.names[i] for i in range(len(tensors)) if i not in passage.unsaved}
        watched = {i: weakref.ref(outputs[i]) for i in computed if i not in kept_anyway}
        passage.on_backward = lambda seen: on_backward(Seen(layouts=seen, held=still_there(watched)))
        assert self.step.template is not None
        return self.step.template.filled([outputs[i] for i in range(len(outputs))])


def forward_function(model: nn.Module) -> Any:
    """What computes a model's forward: one of its own, or its class's."""
    return vars(model).get("forward") or type(model).forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a caller does with the outputs of a planned forward."""

    layouts: dict[int, Layout]  # of the outputs that get a gradient
    held: frozenset[int]
