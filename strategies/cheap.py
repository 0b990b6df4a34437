"""`cheap`: drop what is cheap to recompute, keep what convolutions and matrix products made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from planner.analysis import candidates, temporaries
from planner.ir import Graph, Phase, Rerun
from planner.plan import Plan, recompute_once
from planner.solve import Problem, cheapest

EXPENSIVE = ("conv", "mm", "bmm", "matmul", "linear", "attention", "einsum", "rnn", "lstm", "gru")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheap:
    """Drops the outputs of normalisation, activation, pooling and other elementwise ops.

    The rule of thumb behind selective checkpointing: it looks at an op's kind only, at no time and no size, and
    knows two plans. The first also keeps where branches meet, such as a residual sum, so that no recomputation
    runs through more than one block; the second drops these too.
    """

    name: ClassVar[str] = "cheap"

    def plan(self, problem: Problem) -> Plan:
        graph, joins = problem.graph, _joins(problem.graph)
        dropped = [s for s in candidates(graph) if not expensive(graph, s)]
        plans = [
            Plan(),
            recompute_once(graph, [s for s in dropped if s not in joins], kept=joins),
            recompute_once(graph, dropped),
        ]
        return cheapest(problem, plans)


def expensive(graph: Graph, storage: int) -> bool:
    """Whether a storage was made by a convolution, a matrix product, attention or a recurrent layer."""
    made = graph.maker[storage]
    assert made is not None
    words = graph.ops[made].target.replace("_", ".").split(".")
    return any((word.startswith(EXPENSIVE) and word != "convert") or word.endswith("mm") for word in words)


def _random(graph: Graph, storage: int) -> bool:
    made = graph.maker[storage]
    return made is not None and graph.ops[made].rerun is Rerun.REPLAY_RNG


def _joins(graph: Graph) -> set[int]:
    """What forward ops make from two or more tensors of at least its own size that could themselves be dropped.

    A random mask is no branch.
    """
    droppable = {s for s in (*candidates(graph), *temporaries(graph)) if not _random(graph, s)}
    found: set[int] = set()
    for op in graph.ops:
        made = graph.makes[op.id]
        if op.phase is not Phase.FORWARD or len(made) != 1 or made[0] not in droppable:
            continue
        size = graph.storages[made[0]].nbytes
        if sum(s in droppable and graph.storages[s].nbytes >= size for s in graph.reads[op.id]) > 1:
            found.add(made[0])
    return found
