"""Random draws that a traced step takes back and repeats, as activation checkpointing inside a model does.

Torch's checkpointing saves the generator's state before a part of the forward and sets it again when it runs that part
once more in the backward. The repeated draws are the first ones: in the graph they become copies of those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from profiler.backend import reseeding_functions
from profiler.errors import CaptureError
from profiler.ops import aten, is_random, written
from profiler.tracing.fake_tensors.patches import Patch, patched


@dataclass(frozen=True, slots=True, kw_only=True)
class Redraw:
    """An op that draws again what another one drew before."""

    node: fx.Node
    first: fx.Node


class Draws:
    """Follows the CPU's default generator through a trace: which draw comes when, and which are repeated."""

    def __init__(self, tracer: Any) -> None:
        self.redraws: list[Redraw] = []
        self._tracer = tracer
        self._stream: list[fx.Node] = []  # draws in the order in which the generator gives them
        self._position = 0  # how many of them the generator has given, as it stands now
        self._seen = 0  # nodes of the graph that were looked at
        self._states: dict[int, tuple[Tensor, int]] = {}  # states that the step has asked for
        self._lost = False  # whether the generator stands where no draw of this step has brought it

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, every state that is asked for or set is noted."""
        patches: list[Patch] = [
            (owner, "get_rng_state", self._getting(owner.get_rng_state)) for owner in (torch, torch.random)
        ]
        patches += [(owner, "set_rng_state", self._setting(owner.set_rng_state)) for owner in (torch, torch.random)]
        elsewhere = [(torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.random, "seed")]
        elsewhere += reseeding_functions()
        patches += [(owner, name, self._losing(getattr(owner, name))) for owner, name in elsewhere]
        with patched(patches):
            yield

    def _getting(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_rng_state() -> Tensor:
            self._look()
            state = function()
            self._states[id(state)] = (state, self._position)
            return state

        return get_rng_state

    def _setting(self, function: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(new_state: Tensor) -> None:
            self._look()
            known = self._states.get(id(new_state))
            self._lost = known is None
            self._position = self._position if known is None else known[1]
            function(new_state)

        return set_rng_state

    def _losing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._look()
            self._lost = True
            return function(*args, **kwargs)

        return call

    def _look(self) -> None:
        """Take in what was drawn since the last time."""
        nodes = list(self._tracer.graph.nodes)
        for node in nodes[self._seen :]:
            if is_random(node) and not self._has_own_generator(node):
                self._take(node)
        self._seen = len(nodes)

    def _has_own_generator(self, node: fx.Node) -> bool:
        held = [getattr(self._tracer.root, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"]
        return any(isinstance(one, torch.Generator) for one in held)

    def _take(self, node: fx.Node) -> None:
        if self._lost:
            raise _refusal()
        if self._position == len(self._stream):
            self._stream.append(node)
        else:
            first = self._stream[self._position]
            if not _draws_alike(node, first):
                raise _refusal()
            self.redraws.append(Redraw(node=node, first=first))
        self._position += 1

    def finish(self) -> None:
        """Once the step has run: CaptureError where it leaves the generator where its graph would not."""
        self._look()
        if self._lost or self._position != len(self._stream):
            raise _refusal()


def _refusal() -> CaptureError:
    return CaptureError(
        "the step sets the state of the random generator to one that is not its own, or draws something else from an "
        "earlier one, which a graph cannot repeat: a manual_seed belongs before the step, or draw from a "
        "torch.Generator of your own; activation checkpointing inside the model (torch.utils.checkpoint, "
        "gradient_checkpointing_enable()) may be switched off, since the plan does its work; or plan the model alone "
        "with checkpoint_model(model, budget=...), which leaves the loop as it is"
    )


def _draws_alike(node: fx.Node, first: fx.Node) -> bool:
    values = (node.meta.get("val"), first.meta.get("val"))
    return node.target is first.target and all(isinstance(v, Tensor) for v in values) and _same_kind(*values)


def _same_kind(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.device == b.device)


def repeat_draws(module: fx.GraphModule, redraws: Sequence[Redraw]) -> None:
    """In the graph, what is drawn again is a copy of what was drawn first."""
    graph, copies = module.graph, dict[fx.Node, fx.Node]()
    for redraw in redraws:
        if redraw.first not in copies:
            copies[redraw.first] = _copy_after(graph, redraw.first)
        copy, node = copies[redraw.first], redraw.node
        with graph.inserting_before(node):
            args = (written(node)[0], copy) if written(node) else (copy,)
            target = aten.copy_.default if written(node) else aten.clone.default
            again = graph.call_function(target, args)
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again)
        graph.erase_node(node)
    if redraws:
        module.recompile()


def _copy_after(graph: fx.Graph, first: fx.Node) -> fx.Node:
    """What an op has drawn, before anything is done to it in place."""
    value = first.meta["val"]
    with graph.inserting_after(first):
        copy: fx.Node = graph.call_function(aten.clone.default, (first,))
    with value.fake_mode:
        copy.meta = {**first.meta, "val": value.clone()}
    return copy
