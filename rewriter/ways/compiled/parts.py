"""One call of a graph among those of a step, and what each of its inputs is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.ir import Graph
from planner.schedule import Schedule
from planner.unrolling import unrolled
from profiler.tracing.joint import OUTSIDE_NAME
from rewriter.ways.compiled.own_joint import Ends


@dataclass(frozen=True, slots=True)
class FromCall:
    """An input that is an output of an earlier call."""

    call: int
    output: int


@dataclass(frozen=True, slots=True)
class FromCaller:
    """An input that was there before: a parameter, a buffer, a batch; the same key is the same memory."""

    key: int


@dataclass(frozen=True, slots=True)
class FromGap:
    """An input that the caller's own code made after an earlier call; the same key is the same memory."""

    key: int


Source = FromCall | FromCaller | FromGap


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of a graph: its typed graph, where its ends are, and what each of its inputs is."""

    graph: Graph
    ends: Ends
    sources: tuple[Source | None, ...]  # per input; None for a number
    held: frozenset[int]  # outputs that the caller holds until the backward
    gap_bytes: int = 0  # what the caller allocates at most between this call and the next
    kept_bytes: int = 0  # and what of it is still there in the backward


def as_begun(part: Part, schedule: Schedule) -> Part:
    """The part as a step under way runs it by `schedule`, its share of a plan: nothing of it is left to decide."""
    (turn,) = [op.id for op in part.graph.ops if op.target == OUTSIDE_NAME]
    found, ends = unrolled(part.graph, schedule, at=turn), part.ends
    moved = replace(
        ends,
        inputs=tuple(None if v is None else found.before[v] for v in ends.inputs),
        outputs=tuple(found.before[v] for v in ends.outputs),
        tangents=tuple(None if v is None else found.after[v] for v in ends.tangents),
        gradients=tuple(found.after[v] for v in ends.gradients),
    )
    return replace(part, graph=found.graph, ends=moved)
