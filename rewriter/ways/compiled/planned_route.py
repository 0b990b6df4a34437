"""A way through Dynamo's graphs with its plans: each serves every size at which it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from planner.schedule import Schedule
from planner.simulator import simulate, unplanned
from planner.solve import Solution
from profiler.ops import memory_of
from profiler.tracing.fx_graphs.layouts import Layout
from rewriter.budgets import is_share
from rewriter.other_shapes import LEAST_FORMS
from rewriter.replay import apply
from rewriter.ways.common import ModelSettings
from rewriter.ways.company import open_bytes
from rewriter.ways.compiled.dynamo_graph import DynamoGraph
from rewriter.ways.compiled.limits import Room, beside_bytes, elsewhere_bytes, room_for, solved
from rewriter.ways.compiled.nesting import Nested, nest
from rewriter.ways.compiled.own_joint import OwnJoint
from rewriter.ways.compiled.parts import FromCall, FromCaller, Part, Source, as_begun
from rewriter.ways.compiled.routes import Route
from rewriter.ways.compiled.shares import share
from rewriter.ways.others import Others
from rewriter.ways.own_capture.cutting import Halves, cut
from rewriter.ways.own_capture.passage import Passage
from rewriter.ways.rehearsal import stop_watching

log = logging.getLogger("recompute_planner")


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What runs one call of a route."""

    own: OwnJoint
    halves: Halves
    schedule: Schedule  # its share of the plan's

    def run(
        self, args: Sequence[Any], on_backward: Callable[[dict[int, Layout]], None], *, held_bytes: int
    ) -> tuple[Any, list[Tensor], set[int]]:
        """What the graph returns, on the tape; the tensors of it; and the memory that is kept for the backward.

        `held_bytes` are those of the whole route.
        """
        ends = self.own.ends
        passage = Passage(
            self.halves,
            list(args),
            names=range(len(ends.outputs)),
            trainable=ends.trainable,
            used=ends.used,
            layouts=ends.layouts,
            held_bytes=held_bytes,
        )
        passage.on_backward = on_backward
        tensors = list(passage.through([args[i] for i in ends.receivers]))
        inputs = (args[i] for i in self.halves.saved_inputs)
        kept = {memory_of(one)._cdata for one in inputs if isinstance(one, Tensor) and not one.is_leaf}
        return self.own.filled(tensors, args), tensors, kept | passage.saved_memory


# What a step has run of a plan by the time when it turns off that plan's route.
Begun = tuple[Piece | None, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutePlan:
    """One plan of a route; it serves every size at which its schedule fits."""

    solution: Solution
    pieces: tuple[Piece | None, ...]  # per call; None for one that has no backward
    begun: Begun = ()  # of these, the first: those of another route's plan, which this one goes on from


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The plan that serves a size, and what is known of it there."""

    plan: RoutePlan
    solution: Solution  # at this size
    most_elsewhere_bytes: int  # of a budget in bytes, what other tensors may take


class PlannedRoute:
    """A route with its plans."""

    def __init__(self, route: Route, graphs: Sequence[DynamoGraph], settings: ModelSettings) -> None:
        self.route = route
        self.graphs = [graphs[stop.graph] for stop in route.stops]
        self.settings = settings
        self.plans: list[RoutePlan] = []
        self._chosen: dict[tuple[Any, ...], Chosen] = {}
        self._added_bytes: dict[tuple[Any, ...], int] = {}
        self.last: Chosen | None = None
        self._others = Others()
        self._open_bytes = 0  # what other forwards held at most when this one began

    def plan_for(
        self,
        first: Mapping[str, int],
        own: Sequence[Tensor],
        *,
        begun: Begun = (),
        alike: Sequence[PlannedRoute] = (),
    ) -> RoutePlan:
        """The cheapest plan that fits at these sizes; a new one where none does. OverBudget where none can.

        It goes on from what has `begun`. A share of a budget is one of whichever route adds most, of this one and those
        `alike`: data decide which of them a step takes.
        """
        if (held := open_bytes()) > self._open_bytes and not is_share(self.settings.budget):
            self._open_bytes = held
            self.forget()
        own = [*own, *self.route.inputs()]
        shared = max(other.added_bytes(first) for other in (self, *alike))
        key = self._key(first, begun)
        if key in self._chosen and self._others_have_grown(self._chosen[key].most_elsewhere_bytes, own):
            self.forget()
        if key not in self._chosen:
            self._chosen[key] = self._choose(self.route.numbers_like(first), own, begun, shared)
        self.last = self._chosen[key]
        return self.last.plan

    def known_plan(self, first: Mapping[str, int], begun: Begun) -> RoutePlan | None:
        """What was planned for a step that has begun so: nothing is judged anew in the middle of one."""
        found = self._chosen.get(self._key(first, begun))
        if found is None:
            return None
        self.last = found
        return found.plan

    @staticmethod
    def _key(first: Mapping[str, int], begun: Begun) -> tuple[Any, ...]:
        return *sorted(first.items()), begun

    def _others_have_grown(self, most_bytes: int, own: Sequence[Tensor]) -> bool:
        """Whether tensors outside of the model leave less of a budget in bytes than a plan takes."""
        device = self.graphs[0].device
        count = partial(elsewhere_bytes, self.settings, device, own)
        return self.settings.in_bytes and self._others.exceed(most_bytes, device, count)

    def forget(self) -> None:
        """What was chosen is judged anew, in what room there is then."""
        self._chosen.clear()

    def added_bytes(self, first: Mapping[str, int]) -> int:
        """What the route adds at its peak as it is, at these sizes."""
        key = tuple(sorted(first.items()))
        if key not in self._added_bytes:
            stop_watching()  # ops are measured here
            graph = self.nested(self.route.numbers_like(first)).graph
            self._added_bytes[key] = unplanned(graph, in_place=self.settings.in_place).above_start_bytes
        return self._added_bytes[key]

    def _choose(
        self, numbers: Sequence[Mapping[str, int]], own: Sequence[Tensor], begun: Begun, shared_bytes: int
    ) -> Chosen:
        stop_watching()  # ops are measured here
        nested = self.nested(numbers, begun)
        device = self.graphs[0].device
        elsewhere = elsewhere_bytes(self.settings, device, own)
        room = room_for(nested.graph, self.settings, device, elsewhere=elsewhere, added_bytes=shared_bytes)
        plans = [plan for plan in self.plans if plan.begun == begun]
        fitting = [(plan, found) for plan in plans if (found := self._judged(plan, nested, room)) is not None]
        best = min(fitting, key=lambda pair: _recompute_us(pair[1]), default=None)
        needless = unplanned(nested.graph, in_place=self.settings.in_place).peak_bytes <= room.usable_bytes
        if best is not None and not (needless and _recompute_us(best[1])):
            return self._chosen_in(room, *best)
        solution = solved(nested.graph, self.settings, room, self.route.company)
        plan = RoutePlan(solution=solution, pieces=self._pieces(nested, solution, begun), begun=begun)
        self.plans.insert(0, plan)
        del self.plans[self.settings.most_shapes or LEAST_FORMS :]
        log.info("%s", solution)
        return self._chosen_in(room, plan, solution)

    def _chosen_in(self, room: Room, plan: RoutePlan, solution: Solution) -> Chosen:
        assert solution.timeline is not None
        taken = solution.timeline.peak_bytes + beside_bytes(solution, self.settings, self.route.company)
        # Half of what is kept free stays for the error of the prediction.
        most = room.limit_bytes + room.elsewhere_bytes - room.margin_bytes // 2 - taken
        return Chosen(plan=plan, solution=solution, most_elsewhere_bytes=most)

    def _judged(self, plan: RoutePlan, nested: Nested, room: Room) -> Solution | None:
        """The plan's own schedule at other sizes; None where it does not fit."""
        assert plan.solution.schedule is not None
        timeline = simulate(nested.graph, plan.solution.schedule)
        problem = replace(plan.solution.problem, graph=nested.graph, budget_bytes=room.usable_bytes)
        found = replace(plan.solution, problem=problem, timeline=timeline)
        fits = timeline.peak_bytes + beside_bytes(found, self.settings, self.route.company) <= room.usable_bytes
        return found if fits else None

    def own_joint(self, call: int) -> OwnJoint:
        """The joint graph of a call, as this route uses it."""
        graph = self.graphs[call]
        stop = self.route.stops[call]
        return graph.joint(stop.used, stop.layouts)

    def goes_on_from(self, begun: Begun) -> bool:
        """Whether what another route has begun hands over, and expects back, what this one does."""
        return all(
            (piece is not None) == (call in self.route.backward)
            and (piece is None or piece.own is self.own_joint(call))
            for call, piece in enumerate(begun)
        )

    def nested(self, numbers: Sequence[Mapping[str, int]], begun: Begun = ()) -> Nested:
        """All calls that have a backward as one graph, at these sizes; those that have begun as they are."""
        calls = [i for i in range(len(self.graphs)) if i in self.route.backward]
        position = {call: i for i, call in enumerate(calls)}
        growth = self._growth(calls, numbers)
        parts = []
        for call in calls:
            stop, own = self.route.stops[call], self.own_joint(call)
            part = Part(
                graph=own.measured.at(numbers[call]),
                ends=own.ends,
                sources=tuple(_renumbered(source, position) for source in stop.sources),
                held=stop.held,
                gap_bytes=round(growth * stop.gap_bytes),
                kept_bytes=round(growth * stop.kept_bytes),
            )
            piece = begun[call] if call < len(begun) else None
            parts.append(part if piece is None else as_begun(part, piece.schedule))
        return nest(
            parts,
            backward=[position[call] for call in self.route.backward],
            outside_bytes=round(growth * self.route.outside_bytes),
            gradients_leave=self.route.key.accumulating,
            name=f"{len(parts)} graph{'s' if len(parts) > 1 else ''} of Dynamo's",
        )

    def _growth(self, calls: Sequence[int], numbers: Sequence[Mapping[str, int]]) -> float:
        """By how much the outputs of graphs are larger than on the route as it was seen: so is what is made of them."""

        def nbytes(call: int, now: Mapping[str, int]) -> int:
            own = self.own_joint(call)
            graph = own.measured.at(now)
            return sum(graph.storages[graph.values[v].storage].nbytes for v in own.ends.outputs)

        then = sum(nbytes(call, self.route.stops[call].numbers) for call in calls)
        return sum(nbytes(call, numbers[call]) for call in calls) / then if then else 1.0

    def _pieces(self, nested: Nested, solution: Solution, begun: Begun) -> tuple[Piece | None, ...]:
        assert solution.schedule is not None
        pieces: list[Piece | None] = [*begun, *(None for _ in self.graphs[len(begun) :])]
        calls = [i for i in range(len(self.graphs)) if i in self.route.backward]
        for part, call in enumerate(calls):
            if call < len(begun):
                continue
            own = self.own_joint(call)
            schedule = share(nested, solution.schedule, part)
            module = apply(own.joint, schedule)
            first = len(own.ends.outputs)
            halves = cut(module, gradients=range(first, first + len(own.ends.gradients)))
            pieces[call] = Piece(own=own, halves=halves, schedule=schedule)
        return tuple(pieces)


def _renumbered(source: Source | None, position: Mapping[int, int]) -> Source | None:
    if not isinstance(source, FromCall):
        return source
    if source.call in position:
        return FromCall(position[source.call], source.output)
    return FromCaller(hash(source))


def _recompute_us(solution: Solution) -> float:
    assert solution.timeline is not None
    return solution.timeline.recompute_us
