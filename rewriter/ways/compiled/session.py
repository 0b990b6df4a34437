"""Dynamo's graphs of one model on eager's kernels: rehearsed, nested, planned once, run as the plan says."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PlannerError
from planner.solve import Solution
from profiler.errors import CaptureError
from profiler.measuring.meters import meter_for
from profiler.tracing.joint import without_saving_hooks
from rewriter.telling import warn_caller
from rewriter.ways.common import ModelSettings
from rewriter.ways.company import held_bytes
from rewriter.ways.compiled import seams
from rewriter.ways.compiled.dynamo_graph import DynamoGraph
from rewriter.ways.compiled.graph_proof import prove_graph
from rewriter.ways.compiled.noted import noted
from rewriter.ways.compiled.planned_route import Piece, PlannedRoute, RoutePlan
from rewriter.ways.compiled.routes import Called, Journey, Route, RouteKey, Stop

log = logging.getLogger("recompute_planner")

# A part of the model that Dynamo compiles so often changes at every step.
MANY_COMPILATIONS = 5


class EagerSession:
    """All graphs of one model. The first step of each route runs as it would have, to learn what it does."""

    def __init__(self, settings: ModelSettings, *, sees_the_model: bool = True) -> None:
        self.settings = settings
        self.options: Mapping[str, Any] | None = None  # of `torch.compile`, where that asked for it
        self._proves_graphs = settings.prove and not sees_the_model  # where no one else can
        self._proven: weakref.WeakSet[Piece] = weakref.WeakSet()
        self.graphs: list[DynamoGraph] = []
        self.routes: dict[RouteKey, PlannedRoute] = {}
        self.used_last: PlannedRoute | None = None
        self.calls = 0  # of graphs, in training
        self.planned_calls = 0
        self._journey: Journey | None = None
        self._plan: tuple[PlannedRoute, RoutePlan] | None = None
        self._as_it_is = False
        self.refusal = ""  # why nothing can be planned
        self._warned: set[str] = set()

    # -- compiling ------------------------------------------------------------------------------------------

    def compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What runs one graph of Dynamo's."""
        graph = DynamoGraph(len(self.graphs), module, self.run)
        self.graphs.append(graph)
        if graph.is_trainable and graph.symbols and torch.is_grad_enabled():
            self._capture_now(graph)
        again = seams.compiled_before()
        if again >= MANY_COMPILATIONS:
            self._warn(
                f"a part of the model was compiled {again + 1} times by now, because something that it reads changes "
                f"from step to step; after {seams.recompile_limit()} times Dynamo runs it unplanned: make that a "
                "tensor, or see TORCH_LOGS=recompiles"
            )
        return graph

    def _capture_now(self, graph: DynamoGraph) -> None:
        """So that what the joint graph assumes of sizes is among Dynamo's own guards."""
        try:
            graph.joint(None)
        except CaptureError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self.refusal = self.refusal or why
        self._warn(f"this model runs unplanned, as Dynamo made it: {why}")

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn_caller(what)

    # -- running --------------------------------------------------------------------------------------------

    @contextmanager
    def unplanned(self) -> Iterator[None]:
        """Inside, graphs run as Dynamo made them, and nothing is learned."""
        self._as_it_is = True
        try:
            yield
        finally:
            self._as_it_is = False

    def run(self, graph: DynamoGraph, args: Sequence[Any]) -> Any:
        """A call of a graph: planned where a backward can follow and the step is known."""
        in_training = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        if self._as_it_is or not in_training:
            return graph.module(*args)
        self.calls += 1
        if self.is_between_steps:
            self._begin(graph, args)
        journey = self._journey
        assert journey is not None
        called = Called(graph=graph.index, sources=journey.sources(args), numbers=graph.numbers(args))
        piece = self._piece(len(journey.calls), graph, args)
        if piece is None:
            return self._as_dynamo(graph, args, called, journey)
        if self._proves_graphs and piece not in self._proven:
            self._prove(graph, piece, args)
        self.planned_calls += 1
        call = len(journey.calls)
        # All that a route holds stands with its first call.
        held = 0 if call else self._held_bytes()
        result, tensors, saved = piece.run(
            args, lambda used: journey.note_gradient(call, dict.fromkeys(used)), held_bytes=held
        )
        journey.note_call(called, tensors, saved=saved)
        return result

    def note_returned(self, tensors: Sequence[Tensor]) -> None:
        """What the model has returned, and nobody but the caller holds: known where the model is."""
        if self._journey is not None:
            self._journey.note_returned(tensors)

    def _prove(self, graph: DynamoGraph, piece: Piece, args: Sequence[Any]) -> None:
        with without_saving_hooks():
            prove_graph(graph, piece, args)
        self._proven.add(piece)
        log.info("graph %d, planned, is equal to the bit to itself as Dynamo made it", graph.index)

    def _held_bytes(self) -> int:
        assert self._plan is not None
        last = self._plan[0].last
        return 0 if last is None else held_bytes(last.solution)

    @property
    def is_between_steps(self) -> bool:
        """Whether the next forward begins a step."""
        return self._journey is None or self._journey.is_over

    def settle(self) -> None:
        """Learn from a step that is over."""
        journey, self._journey = self._journey, None
        if journey is None:
            return
        graphs = tuple(called.graph for called in journey.calls)
        key = RouteKey(graphs, journey.accumulating)
        known = self.routes.get(key)
        alike = [r.route for r in self.routes.values() if len(r.route.stops) == len(graphs)]
        if journey.is_blind and known is None and not alike:
            return  # nothing tells what eager code allocates on this route: it is watched when it is taken again
        route = journey.route(known.route if known is not None else alike[-1] if alike else None)
        if route is not None and (known is None or _is_another(route, known.route)):
            self.routes[key] = PlannedRoute(route, self.graphs, self.settings)

    def _begin(self, graph: DynamoGraph, args: Sequence[Any]) -> None:
        self.settle()
        accumulating = any(isinstance(a, Tensor) and a.is_leaf and a.grad is not None for a in args)
        route = self._route_from(graph, accumulating)
        self._plan = None if route is None else self._planned(route, graph, args)
        self._journey = Journey(accumulating=accumulating)
        if route is None:
            self._journey.begin(meter_for(graph.device))

    def _planned(
        self, route: PlannedRoute, graph: DynamoGraph, args: Sequence[Any]
    ) -> tuple[PlannedRoute, RoutePlan] | None:
        own = [a for a in args if isinstance(a, Tensor)]
        try:
            plan = route.plan_for(graph.numbers(args), own)
        except CaptureError as error:
            self._refuse(str(error))
            return None
        self.used_last = route
        return route, plan

    def _route_from(self, graph: DynamoGraph, accumulating: bool) -> PlannedRoute | None:
        """The route taken last of those that begin so."""
        fitting = [
            route
            for key, route in reversed(self.routes.items())
            if key.graphs[0] == graph.index and key.accumulating == accumulating
        ]
        if self.used_last in fitting:
            return self.used_last
        return fitting[0] if fitting else None

    def _piece(self, call: int, graph: DynamoGraph, args: Sequence[Any]) -> Piece | None:
        if self._plan is None:
            return None
        route, plan = self._plan
        graphs = route.route.key.graphs
        if call < len(graphs) and graphs[call] == graph.index:
            return plan.pieces[call]
        return self._turned_off(call, graph, args)

    def _turned_off(self, call: int, graph: DynamoGraph, args: Sequence[Any]) -> Piece | None:
        """The step goes another way than was thought: on a known route if there is one, else as Dynamo made it."""
        assert self._journey is not None
        before = (*(called.graph for called in self._journey.calls), graph.index)
        accumulating = self._journey.accumulating
        for key, route in self.routes.items():
            if key.graphs[: len(before)] == before and key.accumulating == accumulating and route.plans:
                self._plan, self.used_last = (route, route.plans[0]), route
                return route.plans[0].pieces[call]
        log.info(
            "the step goes through graph %d, which was not foreseen: it is planned from the next one on", graph.index
        )
        self._plan = self.used_last = None
        return None

    def _as_dynamo(self, graph: DynamoGraph, args: Sequence[Any], called: Called, journey: Journey) -> Any:
        """The graph on the tape as it is, with an eye on its outputs."""
        if journey.calls:
            journey.mark()
        returned = graph.module(*args)
        tensors = list({id(one): one for one in returned if isinstance(one, Tensor)}.values())
        call = len(journey.calls)
        others = noted(tensors, lambda used: journey.note_gradient(call, used))
        journey.note_call(called, others)
        by_id = {id(tensor): other for tensor, other in zip(tensors, others, strict=True)}
        journey.mark()
        return tuple(by_id[id(one)] if isinstance(one, Tensor) else one for one in returned)

    def plan_anew(self) -> None:
        """Forget which plan serves which sizes: there is less room than there was."""
        for route in self.routes.values():
            route.forget()

    # -- what it tells --------------------------------------------------------------------------------------

    @property
    def is_planned(self) -> bool:
        """Whether a step went through a planned graph."""
        return self.used_last is not None and self.used_last.last is not None

    @property
    def solution(self) -> Solution:
        """The plan used last."""
        if self.used_last is None or self.used_last.last is None:
            raise PlannerError("nothing is planned yet: the second training step does that, with its own batch")
        return self.used_last.last.solution

    def uses(self) -> dict[RouteKey, tuple[frozenset[int], ...]]:
        """Which outputs of its graphs get gradients, by route."""
        return {key: tuple(stop.used for stop in planned.route.stops) for key, planned in self.routes.items()}


def _is_another(seen: Route, known: Route) -> bool:
    """Whether a step did something with a graph's outputs that its plan was not made for."""
    if seen.company.keeps_graph and not known.company.keeps_graph:
        return True
    return any(_did_more(a, b) for a, b in zip(seen.stops, known.stops, strict=True))


def _did_more(seen: Stop, known: Stop) -> bool:
    return seen.used != known.used or not seen.held <= known.held
