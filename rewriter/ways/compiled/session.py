"""Dynamo's graphs of one model on eager's kernels: rehearsed, nested, planned once, run as the plan says."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
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
from rewriter.ways.compiled.planned_route import Begun, Piece, PlannedRoute, RoutePlan
from rewriter.ways.compiled.routes import Called, Journey, Route, RouteKey, Stop

log = logging.getLogger("recompute_planner")

# A part of the model that Dynamo compiles so often changes at every step.
MANY_COMPILATIONS = 5
# So many ways through its graphs are planned for one beginning: each has a plan of its own.
MOST_WAYS = 16


class EagerSession:
    """All graphs of one model. The first step of each route runs as it would have, to learn what it does."""

    def __init__(self, settings: ModelSettings, *, sees_the_model: bool = True) -> None:
        self.settings = settings
        self.options: Mapping[str, Any] | None = None  # of `torch.compile`, where that asked for it
        self._proves_graphs = settings.prove and not sees_the_model  # where no one else can
        self._proven: weakref.WeakSet[Piece] = weakref.WeakSet()
        self.graphs: list[DynamoGraph] = []
        self.routes: dict[RouteKey, PlannedRoute] = {}
        self.times_taken = Counter[RouteKey]()
        self.used_last: PlannedRoute | None = None
        self.calls = 0  # of graphs, in training
        self.planned_calls = 0
        self._journey: Journey | None = None
        self._plan: tuple[PlannedRoute, RoutePlan] | None = None
        self._first: Mapping[str, int] = {}  # the symbols of the graph that the step began with
        self._begun: Begun = ()  # what the step has run of plans
        self._foreseen: set[tuple[Any, ...]] = set()  # plans from which all other known ways were planned to turn off
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
        piece = self._piece(len(journey.calls), graph)
        self._begun = (*self._begun, piece)
        if piece is None:
            return self._as_dynamo(graph, args, called, journey)
        if self._proves_graphs and piece not in self._proven:
            self._prove(graph, piece, args)
        self.planned_calls += 1
        called.is_planned = True
        call = len(journey.calls)
        # All that a route holds stands with its first call.
        held = 0 if call else self._held_bytes()
        result, tensors, saved = piece.run(
            args, lambda used: self._note_gradient(journey, call, dict.fromkeys(used)), held_bytes=held
        )
        journey.note_call(called, tensors, saved=saved)
        return result

    def _note_gradient(self, journey: Journey, call: int, used: Mapping[int, None]) -> None:
        if not journey.backward and self._plan is not None and len(journey.calls) < len(self._plan[0].graphs):
            self._ended_early(journey)
        journey.note_gradient(call, used)

    def _ended_early(self, journey: Journey) -> None:
        """The step took a way that is the beginning of the one that it was planned by."""
        if (route := self.routes.get(journey.key)) is not None and route.known_plan(
            self._first, self._begun
        ) is not None:
            self.used_last = route

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
        key = journey.key
        known = self.routes.get(key)
        alike = [r.route for r in self.routes.values()]
        if journey.is_blind and known is None and not any(len(r.stops) == len(key.graphs) for r in alike):
            return  # nothing tells what eager code allocates on this route: it is watched when it is taken again
        route = journey.route(known.route if known is not None else None, alike)
        if route is not None:
            self.times_taken[key] += 1
        if route is None or (known is not None and not _is_another(route, known.route)):
            return
        self.routes[key] = PlannedRoute(route, self.graphs, self.settings)
        self._check_number_of_ways(key)
        for other in self._ways(key.graphs[:1], accumulating=key.accumulating):
            other.forget()
        self._foreseen.clear()

    def _check_number_of_ways(self, key: RouteKey) -> None:
        ways = self._ways(key.graphs[:1], accumulating=key.accumulating)
        if len(ways) > MOST_WAYS:
            self._refuse(
                f"data decide which of its graphs a step goes through, and {len(ways)} ways were seen: each is planned "
                "by itself"
            )

    def _ways(self, graphs: tuple[int, ...], *, accumulating: bool) -> list[PlannedRoute]:
        """The known routes that begin with these graphs."""
        fitting = RouteKey(graphs, accumulating)
        return [route for key, route in self.routes.items() if fitting.begins(key)]

    def _begin(self, graph: DynamoGraph, args: Sequence[Any]) -> None:
        self.settle()
        accumulating = any(isinstance(a, Tensor) and a.is_leaf and a.grad is not None for a in args)
        self._first, self._begun = graph.numbers(args), ()
        ways = self._ways((graph.index,), accumulating=accumulating)
        self._plan = self._planned(ways, args) if ways else None
        self._journey = Journey(accumulating=accumulating)
        if not ways:
            self._journey.begin(meter_for(graph.device))

    def _planned(self, ways: list[PlannedRoute], args: Sequence[Any]) -> tuple[PlannedRoute, RoutePlan] | None:
        """The plan that a step begins with, which may take any of these ways: of the one that adds most."""
        own = [a for a in args if isinstance(a, Tensor)]
        try:
            route, plan = self._heaviest(ways, ways, own, begun=())
            seen = (*sorted(self._first.items()), plan)
            if seen not in self._foreseen:
                self._foresee(ways, ways, own, route, plan)
                self._foreseen.add(seen)
        except CaptureError as error:
            self._refuse(str(error))
            return None
        self.used_last = route
        return route, plan

    def _heaviest(
        self, ways: Sequence[PlannedRoute], alike: Sequence[PlannedRoute], own: Sequence[Tensor], begun: Begun
    ) -> tuple[PlannedRoute, RoutePlan]:
        route = max(ways, key=lambda way: way.added_bytes(self._first))
        return route, route.plan_for(self._first, own, begun=begun, alike=alike)

    def _foresee(
        self,
        ways: Sequence[PlannedRoute],
        alike: Sequence[PlannedRoute],
        own: Sequence[Tensor],
        route: PlannedRoute,
        plan: RoutePlan,
    ) -> None:
        """Plans for where a step may turn off: OverBudget before anything runs if one of the ways does not fit then."""
        turning: dict[tuple[int, ...], list[PlannedRoute]] = {}
        for way in ways:
            if way is not route:
                turning.setdefault(_turn(way.route.key.graphs, route.route.key.graphs), []).append(way)
        for (call, *_), others in turning.items():
            begun = plan.pieces[:call]
            if not all(way.goes_on_from(begun) for way in others):
                raise CaptureError(
                    "data decide which outputs of a graph of Dynamo's get gradients, and the plan of one is for the "
                    "same at every step"
                )
            self._foresee(others, alike, own, *self._heaviest(others, alike, own, begun))

    def _piece(self, call: int, graph: DynamoGraph) -> Piece | None:
        if self._plan is None:
            return None
        route, plan = self._plan
        graphs = route.route.key.graphs
        if call < len(graphs) and graphs[call] == graph.index:
            return plan.pieces[call]
        return self._turned_off(call, graph)

    def _turned_off(self, call: int, graph: DynamoGraph) -> Piece | None:
        """The step goes another way than its plan: on one that was foreseen, else as Dynamo made it."""
        journey = self._journey
        assert journey is not None
        before = (*journey.key.graphs, graph.index)
        ways = self._ways(before, accumulating=journey.accumulating)
        for route in sorted(ways, key=lambda way: way.added_bytes(self._first), reverse=True):
            plan = route.known_plan(self._first, self._begun)
            if plan is not None:
                self._plan, self.used_last = (route, plan), route
                return plan.pieces[call]
        self._warn(
            f"this step goes another way through the model than any that was planned (graphs {_listed(before)} of "
            f"Dynamo's), because data decide which: from there on it runs unplanned, and its peak may exceed the "
            f"budget of {self.settings.budget}. From the next step on this way is known"
        )
        self._plan = self.used_last = None
        journey.begin(meter_for(graph.device))
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
    def way_taken(self) -> RouteKey | None:
        """The route of the last step."""
        return None if self._journey is None else self._journey.key

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


def _turn(graphs: tuple[int, ...], main: tuple[int, ...]) -> tuple[int, ...]:
    """The call at which one way turns off another, and the graph that it goes to; none where it ends there."""
    same = (i for i, pair in enumerate(zip(graphs, main, strict=False)) if pair[0] != pair[1])
    call = next(same, min(len(graphs), len(main)))
    return call, *graphs[call : call + 1]


def _listed(graphs: Sequence[int]) -> str:
    return ", ".join(map(str, graphs))


def _is_another(seen: Route, known: Route) -> bool:
    """Whether a step did something with a graph's outputs that its plan was not made for."""
    if seen.company.keeps_graph and not known.company.keeps_graph:
        return True
    return any(_did_more(a, b) for a, b in zip(seen.stops, known.stops, strict=True))


def _did_more(seen: Stop, known: Stop) -> bool:
    return seen.used != known.used or not seen.held <= known.held
