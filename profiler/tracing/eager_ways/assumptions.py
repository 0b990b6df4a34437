"""What a captured form assumes of values that the step read: checked before each call, or inside the graph.

A read that a few ops work out from the batch and the state is checked before anything runs. One that depends on random
draws or on what the model computes is checked at its place in the graph, which then puts back what it wrote by then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from planner.ir import Phase
from profiler.errors import CaptureError
from profiler.ops import NUMBER, aten, is_getitem, is_random, memory_of, overload, tensors_of, written
from profiler.tracing.eager_ways.metrics import keeps_state
from profiler.tracing.eager_ways.reads import Assumption
from profiler.tracing.eager_ways.slices import Read, generators_of, outside_the_trace, reads_shapes_only, slice_of
from profiler.tracing.fx_graphs.provenance import META, Origin, origin_of
from profiler.tracing.updates.optimizers import OpaqueStep

# A check of more ops than this is part of the step, not something to do before each one.
MOST_OPS_BEFOREHAND = 64
MOST_BYTES_COPIED = 2**20

_HEAVY = ("mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product", "native_", "mkldnn", "embedding")


class BrokenAssumption(CaptureError):  # noqa: N818 - a turn in the road, not a fault
    """The step has come to where its data lead another way than they did when it was captured; all is put back."""

    def __init__(self, said: str, line: str) -> None:
        super().__init__(said)
        self.line = line


def same(a: Any, b: Any) -> bool:
    """Whether two numbers, or lists of them, are the same: NaN is NaN, and 0.0 is not -0.0."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A number that was read, and where."""

    value: Any
    line: str

    def mismatch(self, now: Any) -> str:
        """What to say where it is another number now; "" where it is not."""
        if same(self.value, now):
            return ""
        return f"what `{self.line}` reads from a tensor was {_shown(self.value)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:37]}..."


# -- beforehand -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beforehand:
    """The reads that can be repeated before the step: `inputs` are placeholders by position, `expected` in order."""

    module: fx.GraphModule
    inputs: tuple[int, ...]
    expected: tuple[Expected, ...]

    def broken(self, gathered: Callable[[int], Any]) -> list[BrokenAssumption]:
        """Each number that is not as expected; `gathered` gives an input by its position."""
        with outside_the_trace():
            now = self.module(*(gathered(i) for i in self.inputs))
        pairs = ((one.mismatch(value), one.line) for one, value in zip(self.expected, now, strict=True))
        return [BrokenAssumption(said, line) for said, line in pairs if said]


def beforehand(module: fx.GraphModule, assumptions: Sequence[Assumption]) -> Beforehand | None:
    """What repeats the reads of these assumptions; None where there are none."""
    if not assumptions:
        return None
    copier = _Copier()
    copier.graph.output(tuple(copier.copied(assumption.node) for assumption in assumptions))
    positions = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    return Beforehand(
        module=fx.GraphModule(module, copier.graph, class_name="Beforehand"),
        inputs=tuple(positions[node] for node in copier.inputs),
        expected=tuple(Expected(value=one.expected, line=one.line) for one in assumptions),
    )


class _Copier:
    """A new graph of just what some nodes need."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: dict[fx.Node, fx.Node] = {}
        self._new: dict[fx.Node, fx.Node] = {}
        self._written: set[int] = set()

    def copied(self, wanted: fx.Node) -> fx.Node:
        """The copy of a node, with all that it needs: what is written for one read is not seen by another."""
        self._new, nodes = {}, slice_of([wanted])
        self._written = _memory_written(nodes)
        for node in nodes:
            self._copy(node)
        return self._new[wanted]

    def _copy(self, node: fx.Node) -> None:
        if node.op == "call_function":
            source = self._shape if reads_shapes_only(node) else self._new.__getitem__
            self._new[node] = self.graph.node_copy(node, source)
            return
        own = self._input(node) if node.op == "placeholder" else self.graph.node_copy(node)
        is_written = any(memory_of(t)._cdata in self._written for t in tensors_of(node))
        self._new[node] = self.graph.call_function(aten.clone.default, (own,)) if is_written else own

    def _input(self, node: fx.Node) -> fx.Node:
        if node not in self.inputs:
            before = list(self.inputs.values())
            with self.graph.inserting_after(before[-1] if before else None):
                self.inputs[node] = self.graph.placeholder(node.name)
        return self.inputs[node]

    def _shape(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        where = {"dtype": value.dtype, "device": value.device}
        size, stride = tuple(value.shape), tuple(value.stride())
        return self.graph.call_function(aten.empty_strided.default, (size, stride), where)


class Turns:
    """How often the data led another way than they had; CaptureError where they do so ever again.

    That is for one line and one shape of the batch, for one line that reads ever other numbers whatever the shape, and
    for many turns without a step in between that needed none.
    """

    MOST = 2
    MOST_NUMBERS = 4  # a flag has two
    MOST_IN_A_ROW = 6

    def __init__(self, *, advice: str = "") -> None:
        self._advice = advice
        self._counts: Counter[tuple[str, str]] = Counter()
        self._said: dict[str, set[str]] = {}  # by line
        self._in_a_row = 0

    def passed(self) -> None:
        """A step went by a form that was there."""
        self._in_a_row = 0

    def note(self, broken: Sequence[BrokenAssumption], batch: Any) -> None:
        """A new form is about to be captured because of these reads."""
        shapes = repr([tuple(x.shape) for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)])
        self._in_a_row += bool(broken)
        for one in broken:
            self._counts[one.line, shapes] += 1
            said = self._said.setdefault(one.line, set())
            said.add(str(one))
            if self._counts[one.line, shapes] > self.MOST:
                self._refuse(one, further=self.MOST)
            if len(said) > self.MOST_NUMBERS:
                self._refuse(one, further=self.MOST_NUMBERS)
            if self._in_a_row > self.MOST_IN_A_ROW:
                self._refuse(one, further=self.MOST_IN_A_ROW, what="such reads have")

    def _refuse(self, one: BrokenAssumption, *, further: int, what: str = "it has") -> NoReturn:
        raise CaptureError(
            f"{one}, and {what} led to {further} further captures already: a value that differs at nearly every step "
            f"cannot be part of a captured one{self._advice}"
        )


# -- inside the graph -------------------------------------------------------------------------------------------------

_holding: ContextVar[bool] = ContextVar("assumptions are taken to hold", default=False)


@contextmanager
def taken_to_hold() -> Iterator[None]:
    """Inside, no graph stops at a broken assumption: what it costs does not depend on where the data lead."""
    token = _holding.set(True)
    try:
        yield
    finally:
        _holding.reset(token)


def are_taken_to_hold() -> bool:
    """Whether no graph stops at a broken assumption here."""
    return _holding.get()


class SaveGenerator:
    """The state that a generator has when the graph begins."""

    __name__ = __qualname__ = "save_generator"

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self) -> Tensor:
        return self.generator.get_state()


class Check:
    """Goes on where a number is as expected; otherwise puts back what was written so far, and stops the step."""

    __name__ = __qualname__ = "check"

    def __init__(self, expected: Expected, generators: Sequence[torch.Generator]) -> None:
        self._expected = expected
        self._generators = tuple(generators)

    def __call__(self, now: Any, live: Sequence[Tensor], saved: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        said = self._expected.mismatch(now)
        if not said or are_taken_to_hold():
            return
        for tensor, copy in zip(live, saved, strict=True):
            tensor.copy_(copy)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        raise BrokenAssumption(said, self._expected.line)


def insert_checks(module: fx.GraphModule, assumptions: Sequence[Assumption]) -> None:
    """Check each assumption as soon as its number is known, before an optimizer changes anything."""
    if assumptions:
        _Inserter(module).run(assumptions)


class _Inserter:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.held: Read = lambda node: getattr(module, str(node.target), None)

    def run(self, assumptions: Sequence[Assumption]) -> None:
        for one in assumptions:
            self._move_up(one)
        places = [one.node for one in assumptions]
        before = self._before_last(places)
        states = {generator: self._state_node(generator) for generator in generators_of(before, self.held)}
        written_by_then = self._written(before)
        saved = [self._copy_of(node) for node in written_by_then]
        for one, place in zip(assumptions, places, strict=True):
            self._check(one, place, written_by_then, saved, states)

    def _move_up(self, one: Assumption) -> None:
        """What the number needs goes before the first op of the optimizer's, as long as it reads nothing of that."""
        order = list(self.graph.nodes)
        first = next((i for i, node in enumerate(order) if _is_update(node)), len(order))
        position = {node: i for i, node in enumerate(order)}
        late = [node for node in slice_of([one.node]) if position[node] >= first]
        if not any(_is_update(node) for node in late):
            for node in late:
                order[first].prepend(node)

    def _before_last(self, places: Sequence[fx.Node]) -> list[fx.Node]:
        nodes, wanted = list[fx.Node](), set(places)
        for node in self.graph.nodes:
            nodes.append(node)
            wanted.discard(node)
            if not wanted:
                break
        return nodes

    def _written(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        memory = _memory_written(nodes)
        own = [node for node in self.graph.nodes if node.op in ("placeholder", "get_attr")]
        return [node for node in own if any(memory_of(t)._cdata in memory for t in tensors_of(node))]

    def _start(self) -> fx.Node:
        first: fx.Node = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        return first

    def _state_node(self, generator: torch.Generator) -> fx.Node:
        with self.graph.inserting_before(self._start()):
            node = self.graph.call_function(SaveGenerator(generator))
        nbytes = int(generator.get_state().numel())
        node.meta = {META: _beginning(), "val": self._fake(lambda: torch.empty(nbytes, dtype=torch.uint8))}
        return node

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            self._start().prepend(node)
        with self.graph.inserting_before(self._start()):
            copy: fx.Node = self.graph.call_function(aten.clone.default, (node,))
        copy.meta = {META: _beginning(), "val": self._fake(lambda: node.meta["val"].clone())}
        return copy

    def _fake(self, make: Callable[[], Tensor]) -> Tensor:
        values = (tensor for node in self.graph.nodes for tensor in tensors_of(node))
        with next(values).fake_mode:  # type: ignore[attr-defined]
            return make()

    def _check(
        self,
        one: Assumption,
        place: fx.Node,
        live: list[fx.Node],
        saved: list[fx.Node],
        states: dict[torch.Generator, fx.Node],
    ) -> None:
        target = Check(Expected(value=one.expected, line=one.line), list(states))
        with self.graph.inserting_after(place):
            node = self.graph.call_function(target, (one.node, live, saved, list(states.values())))
        node.meta = {META: origin_of(one.node), "val": None}


def _is_update(node: fx.Node) -> bool:
    if isinstance(node.target, OpaqueStep) or keeps_state(node):
        return True
    return META in node.meta and origin_of(node).phase is Phase.OPTIMIZER and bool(written(node))


def _memory_written(nodes: Iterable[fx.Node]) -> set[int]:
    return {memory_of(t)._cdata for node in nodes for source in written(node) for t in tensors_of(source)}


def _beginning() -> Origin:
    return Origin(phase=Phase.FORWARD, round=0)


# -- which goes where -------------------------------------------------------------------------------------------------


def is_checked_beforehand(assumption: Assumption) -> bool:
    """Whether a read can be repeated before each step for next to nothing, without drawing or writing."""
    needed = slice_of([assumption.node])
    ops = [node for node in needed if node.op == "call_function"]
    if len(ops) > MOST_OPS_BEFOREHAND or any(is_random(node) or _is_heavy(node) for node in ops):
        return False
    return _can_be_copied([node for node in needed if node.op != "call_function"], _memory_written(ops))


def _can_be_copied(inputs: Sequence[fx.Node], memory: set[int]) -> bool:
    """Whether those of the inputs that are written to are few bytes, each in memory of its own."""
    tensors = [t for node in inputs for t in tensors_of(node) if memory_of(t)._cdata in memory]
    alone = len({memory_of(t)._cdata for t in tensors}) == len(tensors)
    return alone and sum(memory_of(t).nbytes() for t in tensors) <= MOST_BYTES_COPIED


def _is_heavy(node: fx.Node) -> bool:
    op = overload(node)
    if NUMBER in node.meta or is_getitem(node):
        return False
    if op is None or origin_of(node).phase is Phase.BACKWARD:
        return True
    return str(op.overloadpacket.__name__).startswith(_HEAVY)
