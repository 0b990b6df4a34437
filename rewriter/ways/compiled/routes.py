"""The graphs that one training step goes through: which, in which order, what flows between them, what lies around."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from profiler.measuring.meters import Meter, Span, Watch
from profiler.ops import memory_of
from profiler.tracing.fx_graphs.layouts import Layout
from rewriter.ways.company import Company
from rewriter.ways.compiled.parts import FromCall, FromCaller, FromGap, Source
from rewriter.ways.rehearsal import begin_watching, is_graph_kept, refuse_second_derivative


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What a route is known by."""

    graphs: tuple[int, ...]
    accumulating: bool  # something had a `.grad` when it began

    def begins(self, other: RouteKey) -> bool:
        """Whether the other route goes this way first."""
        return self.accumulating == other.accumulating and other.graphs[: len(self.graphs)] == self.graphs

    def shared(self, other: RouteKey) -> int:
        """How many calls both have in common before they part."""
        pairs = enumerate(zip(self.graphs, other.graphs, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.graphs), len(other.graphs)))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One call of a graph on a route."""

    graph: int
    sources: tuple[Source | None, ...]
    numbers: Mapping[str, int]  # the graph's symbols as they were
    used: frozenset[int]  # outputs that got a gradient
    held: frozenset[int]  # outputs that were still there when the backward began
    layouts: Mapping[int, Layout]  # of gradients that lie in memory otherwise than the outputs that they are for
    gap_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Route:
    """A step as it was seen. `backward` is the order of calls in the backward; not all need be in it."""

    key: RouteKey
    stops: tuple[Stop, ...]
    backward: tuple[int, ...]
    outside_bytes: int
    company: Company = Company()  # noqa: RUF009 - frozen
    given: tuple[weakref.ref[Tensor], ...] = ()  # what the graphs were given: parameters, buffers, a batch

    def inputs(self) -> list[Tensor]:
        """Those of the tensors that its graphs were given which are still there."""
        return [tensor for ref in self.given if (tensor := ref()) is not None]

    def numbers_like(self, first: Mapping[str, int]) -> tuple[Mapping[str, int], ...]:
        """The symbols of all graphs where those of the first are `first`.

        What was equal then will be equal now; other numbers, on which data may decide, grow as the first graph's do.
        """
        then = self.stops[0].numbers
        now = {number: first[name] for name, number in then.items()}
        growth = math.prod(after / before for before, after in now.items() if before)
        return tuple(
            {name: now.get(number, math.ceil(growth * number)) for name, number in stop.numbers.items()} if i else first
            for i, stop in enumerate(self.stops)
        )


@dataclass(kw_only=True)
class Called:
    """A call as it is noted while the step runs."""

    graph: int
    sources: tuple[Source | None, ...]
    numbers: Mapping[str, int]
    is_planned: bool = False
    outputs: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)  # of the outputs
    used: set[int] = field(default_factory=set)
    held: frozenset[int] = frozenset()
    layouts: dict[int, Layout] = field(default_factory=dict)


class Journey:
    """One step in progress: notes what a Route is made of."""

    def __init__(self, *, accumulating: bool) -> None:
        self.accumulating = accumulating
        self.calls: list[Called] = []
        self.backward: list[int] = []
        self.keeps_graph = False  # a backward leaves what was saved for another
        self.is_blind = False  # it could not be watched this time
        self._watch: Watch | None = None
        self._unwatched = 0  # calls before the watch began
        self._spans: list[Span] | None = None
        self.is_cut = False  # whether the watch ended where no other may begin at once
        self._saved: set[int] = set()  # memory that plans keep, and free, by themselves
        self._returned: dict[int, list[weakref.ref[Tensor]]] = {}  # memory -> what the caller got of it
        self._given: dict[int, weakref.ref[Tensor]] = {}  # what the caller gave to a graph
        self._owners: dict[int, tuple[FromCall, weakref.ref[Tensor]]] = {}  # memory -> the output that made it

    @property
    def key(self) -> RouteKey:
        """The route so far."""
        return RouteKey(tuple(called.graph for called in self.calls), self.accumulating)

    @property
    def is_over(self) -> bool:
        """Whether the next forward begins another step: this one went backward, or nobody can any more."""
        outputs = [output for called in self.calls for output in called.outputs.values()]
        return bool(self.backward) or not any(output() is not None for output in outputs)

    def sources(self, args: Sequence[Any]) -> tuple[Source | None, ...]:
        """Where each input of a call comes from."""
        return tuple(self._source(one) if isinstance(one, Tensor) else None for one in args)

    def _source(self, tensor: Tensor) -> Source:
        key = memory_of(tensor)._cdata
        owner = self._owners.get(key)
        if owner is not None and owner[1]() is not None:
            return owner[0]
        # What hangs on the tape and no graph has made, eager code has made, since the step began.
        if self.calls and tensor.grad_fn is not None:
            return FromGap(key)
        self._given[id(tensor)] = weakref.ref(tensor)
        return FromCaller(key)

    def note_call(self, called: Called, outputs: Sequence[Tensor], *, saved: Collection[int] = ()) -> int:
        """A call has returned these tensors; `saved` is the memory that its plan keeps for its backward."""
        call = len(self.calls)
        self._saved |= set(saved)
        given = {s.key for s in called.sources if isinstance(s, (FromCaller, FromGap))}
        for i, output in enumerate(outputs):
            called.outputs[i] = weakref.ref(output)
            key = called.memory[i] = memory_of(output)._cdata
            if key not in given:
                self._owners[key] = FromCall(call, i), weakref.ref(output)
        self.calls.append(called)
        return call

    def note_returned(self, tensors: Sequence[Tensor]) -> None:
        """The model has returned these, which nobody but the caller holds."""
        for tensor in tensors:
            self._returned.setdefault(memory_of(tensor)._cdata, []).append(weakref.ref(tensor))

    def _is_held(self, call: int, output: int) -> bool:
        """Whether the caller holds an output: what autograd holds for a backward is still there, too."""
        called = self.calls[call]
        memory = called.memory[output]
        if called.outputs[output]() is None or memory in self._saved:
            return False
        if memory in self._returned:
            return any(ref() is not None for ref in self._returned[memory])
        return not any(FromCall(call, output) in later.sources for later in self.calls[call + 1 :])

    def note_gradient(self, call: int, outputs: Mapping[int, Layout | None]) -> None:
        """Gradients have come back for outputs of a call, in a layout of their own or in that of the output."""
        refuse_second_derivative()
        if not self.backward:
            for number, called in enumerate(self.calls):
                called.held = frozenset(i for i in called.outputs if self._is_held(number, i))
            self.mark()
        self.keeps_graph |= is_graph_kept()
        if call not in self.backward:
            self.backward.append(call)
        self.calls[call].used |= set(outputs)
        self.calls[call].layouts |= {i: layout for i, layout in outputs.items() if layout is not None}

    def mark(self) -> None:
        """A span of the watch ends here."""
        if self._watch is not None:
            self._watch.mark()

    def begin(self, meter: Meter) -> None:
        """Watch memory from now on, where that is safe."""
        self._unwatched = len(self.calls)
        self.is_blind = not begin_watching(self)
        if not self.is_blind:
            self._watch = meter.watch()

    def stop(self) -> None:
        """End the watch, if there is one."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._spans = watch.spans()
            self.is_cut = watch.is_cut

    def route(self, known: Route | None, others: Sequence[Route]) -> Route | None:
        """What was seen; None where nothing went backward.

        Where nobody watched memory, the route itself tells of it, if it is `known`, or the most alike of the others.
        """
        self.stop()
        if not self.backward:
            return None
        key = self.key
        like = known or max(others, key=lambda other: _likeness(other.key, key), default=None)
        sizes = self._sizes(like)
        stops = tuple(
            Stop(
                graph=called.graph,
                sources=called.sources,
                numbers=called.numbers,
                used=frozenset(called.used),
                held=called.held,
                layouts=like.stops[i].layouts if called.is_planned and like is not None else called.layouts,
                gap_bytes=sizes[i][0],
                kept_bytes=sizes[i][1],
            )
            for i, called in enumerate(self.calls)
        )
        return Route(
            key=key,
            stops=stops,
            backward=tuple(self.backward),
            outside_bytes=sizes[-1][0],
            company=Company(keeps_graph=self.keeps_graph),
            given=tuple(self._given.values()),
        )

    def _sizes(self, like: Route | None) -> list[tuple[int, int]]:
        """Per call, what the caller allocated after it, up to the next or to the backward, and what of it stayed."""
        spans = (self._spans or [])[1 if self._unwatched else 0 :]  # what goes before the first call watched is no gap
        gaps = spans[1::2]
        seen = [(g.peak_bytes - g.before_bytes, max(0, g.after_bytes - g.before_bytes)) for g in gaps]
        wanted = len(self.calls) - self._unwatched
        watched = seen[:wanted] if like is None or len(seen) >= wanted else []
        sizes = [(0, 0)] * len(self.calls)
        if like is not None:
            stops = [(stop.gap_bytes, stop.kept_bytes) for stop in like.stops[: len(sizes) - 1]]
            sizes[: len(stops)] = stops
            sizes[-1] = (like.outside_bytes, like.stops[-1].kept_bytes)
        return sizes[: self._unwatched] + watched + sizes[self._unwatched + len(watched) :]


def _likeness(known: RouteKey, key: RouteKey) -> tuple[Any, ...]:
    return known.shared(key), len(known.graphs) == len(key.graphs), known.accumulating == key.accumulating
