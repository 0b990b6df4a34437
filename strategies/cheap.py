"""`cheap`: drop what is cheap to recompute, keep what convolutions and matrix products made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner.ir import Graph
from planner.plan import Plan, candidates, recompute_once
from planner.solve import Problem

EXPENSIVE = ("conv", "mm", "bmm", "matmul", "linear", "attention", "einsum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheap:
    """Drops the outputs of normalisation, activation, pooling and other elementwise ops.

    The rule of thumb behind selective checkpointing: it looks at an op's kind only, at no time and no size,
    and knows one plan for every budget that keeping everything does not meet.
    """

    name: ClassVar[str] = "cheap"

    def plan(self, problem: Problem) -> Plan:
        if problem.unplanned.peak_bytes <= problem.budget_bytes:
            return Plan()
        return recompute_once(problem.graph, [s for s in candidates(problem.graph) if not _expensive(problem.graph, s)])


def _expensive(graph: Graph, storage: int) -> bool:
    made = graph.maker[storage]
    assert made is not None
    words = graph.ops[made].target.replace("_", ".").split(".")
    return any((word.startswith(EXPENSIVE) and word != "convert") or word.endswith("mm") for word in words)
