"""Why each storage was kept or dropped, in words and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from planner.analysis import candidates, cannot_drop, liveness, temporaries
from planner.ir import Graph, Phase, Role
from planner.plan import Eviction, Plan, Restore, recompute_us
from planner.schedule import Schedule
from planner.units import human_bytes
from planner.walk import Freed, Launched, Ran, Waited, walk


class Choice(Enum):
    """What a plan does with a storage."""

    KEEP = "kept"
    RECOMPUTE = "dropped"
    OFFLOAD = "moved to the host"
    NOT_A_CHOICE = "not a choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One storage: what was decided, and the numbers behind it.

    `recompute_us` is what making it again costs from what the plan keeps; None where it cannot be. `live` are the spans
    of ops (from the one that makes it to the last that uses it) in which it is resident.
    """

    storage: int
    name: str
    role: Role
    choice: Choice
    nbytes: int
    recompute_us: float | None
    live: tuple[tuple[str, str], ...]
    reason: str


def explain(graph: Graph, plan: Plan, schedule: Schedule) -> tuple[Decision, ...]:
    """A reason for every storage, in id order."""
    return tuple(_Explainer(graph, plan, schedule).all())


class _Explainer:
    def __init__(self, graph: Graph, plan: Plan, schedule: Schedule) -> None:
        self.graph = graph
        self.evicted = {e.storage for e in plan.evictions if e.how is Restore.RECOMPUTE}
        self.moved = {e.storage: e for e in reversed(plan.offloads)}
        self.candidates = set(candidates(graph))
        self.temporaries = set(temporaries(graph))
        self.spans = residency(graph, schedule)

    def all(self) -> Iterable[Decision]:
        for storage in self.graph.storages:
            yield self._decision(storage.id)

    def _decision(self, storage: int) -> Decision:
        record, choice = self.graph.storages[storage], self._choice(storage)
        cost = recompute_us(self.graph, storage, self.evicted) if storage in self.candidates else None
        ops = self.graph.ops
        return Decision(
            storage=storage,
            name=self.graph.storage_names[storage],
            role=record.role,
            choice=choice,
            nbytes=record.nbytes,
            recompute_us=cost,
            live=tuple((ops[first].name, ops[last].name) for first, last in self.spans.get(storage, ())),
            reason=self._words(storage, choice, cost),
        )

    def _choice(self, storage: int) -> Choice:
        if storage in self.moved:
            return Choice.OFFLOAD
        if storage in self.evicted and storage in self.candidates:
            return Choice.RECOMPUTE
        return Choice.KEEP if storage in self.candidates else Choice.NOT_A_CHOICE

    def _words(self, storage: int, choice: Choice, cost: float | None) -> str:
        graph = self.graph
        size, live = human_bytes(graph.storages[storage].nbytes), liveness(graph)[storage]
        if choice is Choice.NOT_A_CHOICE:
            if storage in self.temporaries:
                return "the backward never reads it"
            return cannot_drop(graph, storage) or self._why_no_candidate(storage)
        if choice is Choice.OFFLOAD:
            return f"{choice.value}: {size} {self._journey(self.moved[storage])}{_instead(cost)}"
        assert live.idle_after is not None
        assert live.idle_until is not None
        idle = f"idle from {graph.ops[live.idle_after].name} to {graph.ops[live.idle_until].name}"
        return f"{choice.value}: {size} {idle}, {cost:.0f} µs to recompute"

    def _journey(self, move: Eviction) -> str:
        assert move.gone_before is not None
        assert move.back_before is not None
        assert move.restore_before is not None
        ops = self.graph.ops
        return (
            f"copied out after {ops[move.free_after].name}, gone before {ops[move.gone_before].name}, on its way back "
            f"before {ops[move.back_before].name}, back before {ops[move.restore_before].name}"
        )

    def _why_no_candidate(self, storage: int) -> str:
        made = self.graph.maker[storage]
        if made is not None and self.graph.ops[made].phase is not Phase.FORWARD:
            return f"made by the {self.graph.ops[made].phase.value} itself, used soon after"
        return "what it is computed from changes before it could be recomputed"


def _instead(recompute_us: float | None) -> str:
    return ", cannot be recomputed" if recompute_us is None else f", {recompute_us:.0f} µs to recompute"


def residency(graph: Graph, schedule: Schedule) -> dict[int, list[tuple[int, int]]]:
    """Per storage made by the step: the spans in which it is resident, as (op that ran first, op that ran last)."""
    spans: dict[int, list[tuple[int, int]]] = {}
    since: dict[int, int] = {}
    current = 0
    for event in walk(graph, schedule):
        match event:
            case Ran():
                current = event.step.op
            case Freed() | Launched() | Waited():
                pass
            case _:
                assert_never(event)
        since.update(dict.fromkeys(event.made, current))
        for storage in event.freed:
            spans.setdefault(storage, []).append((since.pop(storage), current))
    for storage, first in since.items():
        spans.setdefault(storage, []).append((first, current))
    return spans
