"""Small graphs that several tests work out by hand, and short ways to talk about them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from planner.errors import NoPlan
from planner.ir import Graph, Phase, Rerun, Role
from planner.plan import BoundClass, Eviction, Plan, with_bound
from planner.solve import Problem
from planner.synthetic import Builder, Network, dropout

BACKWARD = {"phase": Phase.BACKWARD, "role": Role.GRADIENT}


def storage(graph: Graph, name: str) -> int:
    """The storage of that name."""
    return graph.storage_names.index(name)


def storages(graph: Graph, *names: str) -> list[int]:
    return [storage(graph, name) for name in names]


def names(graph: Graph, found: Iterable[int]) -> list[str]:
    """The names of those storages, in their order."""
    return [graph.storage_names[s] for s in found]


def op(graph: Graph, name: str) -> int:
    """The id of the op of that name."""
    return [o.name for o in graph.ops].index(name)


def eviction(graph: Graph, name: str, after: str, before: str | None) -> Eviction:
    """The eviction of a storage between two ops, all by name."""
    restore = None if before is None else op(graph, before)
    return Eviction(storage=storage(graph, name), free_after=op(graph, after), restore_before=restore)


def block(text: str) -> str:
    """A multi-line string as it would stand at the margin."""
    return textwrap.dedent(text).strip("\n")


def read_twice() -> Graph:
    """x -> f -> g -> loss; the backward reads f in g_bw and, after mid_bw, in f_bw."""
    b = Builder("read-twice")
    f = b.one("f", [b.input("x", 10)], 100, time_us=5.0)
    g = b.one("g", [f], 60, time_us=2.0)
    loss = b.one("loss", [g], 1)
    b.outputs.append(loss)
    d_g = b.one("loss_bw", [g], 60, **BACKWARD)
    d_f = b.one("g_bw", [d_g, f], 30, **BACKWARD)
    d_m = b.one("mid_bw", [d_f], 200, **BACKWARD)
    b.one("f_bw", [d_m, f], 10, **BACKWARD)
    return b.build()


def split() -> Graph:
    """One op with two outputs, a and b, each saved by a layer of its own."""
    net = Network("split")
    a, b = net.build.op("halve", [net.x], [40, 50], time_us=3.0)
    left = net.layer("left", [a], 20)
    right = net.layer("right", [b], 20)
    return net.graph(net.layer("loss", [left, right], 1))


def viewed() -> Graph:
    """f, two views of it one upon the other, and a layer that saves the second view."""
    net = Network("viewed")
    f = net.layer("f", [net.x], 80, time_us=3.0)
    top = net.view("heads", net.view("flat", f))
    return net.graph(net.layer("loss", [net.layer("g", [top], 30)], 1))


def viewed_in_backward() -> Graph:
    """The backward reads f through a view that it makes itself, twice."""
    b = Builder("viewed-in-backward")
    f = b.one("f", [b.input("x", 4)], 80, time_us=3.0)
    b.outputs.append(b.one("loss", [f], 1))
    first = b.one("loss_bw", [b.input("seed", 1)], 30, **BACKWARD)
    turned = b.view("turned", f, phase=Phase.BACKWARD)
    second = b.one("g_bw", [first, turned], 30, **BACKWARD)
    b.one("f_bw", [second, turned], 4, **BACKWARD)
    return b.build()


def masked() -> Graph:
    """f, a dropout with its mask, and g."""
    net = Network("masked")
    f = net.layer("f", [net.x], 100)
    return net.graph(net.layer("loss", [net.layer("g", [dropout(net, "drop", f, 100)], 100)], 1))


def updated_between() -> Graph:
    """w changes between the forward that makes h from it and the backward that reads h."""
    b = Builder("updated-between")
    x, w = b.input("x", 8), b.input("w", 8, Role.PARAM)
    h = b.one("f", [x, w], 8)
    gradient = b.one("first_bw", [x], 8, **BACKWARD)
    b.update("first_sgd", w, gradient)
    b.outputs.append(b.one("second_bw", [h], 8, **BACKWARD))
    return b.build()


def foreign_view() -> Graph:
    """f may be rerun, but the backward reads it through a view that a foreign op made of it."""
    b = Builder("foreign-view")
    f = b.one("f", [b.input("x", 8)], 8)
    v = b.view("peek", f)
    b.ops[-1] = replace(b.ops[-1], rerun=Rerun.NEVER, never_reason="it calls foreign code")
    b.outputs.append(b.one("loss", [v], 1))
    b.one("loss_bw", [v], 8, **BACKWARD)
    return b.build()


GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    """The text of a golden file."""
    return (GOLDEN / name).read_text(encoding="utf-8").rstrip("\n")


# -- strategies for read_twice: its peak is 341 bytes, and 321 where f is evicted twice -----------------------------


@dataclass(frozen=True)
class Says:
    """A strategy that always answers the same."""

    name: ClassVar[str] = "says"
    answer: Callable[[Graph], Plan]

    def plan(self, problem: Problem) -> Plan:
        return self.answer(problem.graph)


def twice(graph: Graph) -> Plan:
    return Plan(evictions=(eviction(graph, "f", "g", "g_bw"), eviction(graph, "f", "g_bw", "f_bw")))


def nothing(graph: Graph) -> Plan:
    raise NoPlan("says: no idea")


def bounded(bound_us: float) -> Callable[[Graph], Plan]:
    return lambda graph: with_bound(twice(graph), lower_bound_us=bound_us, bound_class=BoundClass.ANY_SCHEDULE)


# -- one step with every kind of op, and ways to contradict it -----------------------------------------------------

OPS = {name: i for i, name in enumerate(("f", "view", "drop", "g", "g_bw", "step"))}
VALUES = {name: i for i, name in enumerate(("x", "w", "f", "view", "drop", "g", "g_bw"))}


def sample() -> Graph:
    """x, w -> f -> view -> drop -> g, the backward of g, and an optimizer that changes w."""
    b = Builder("sample")
    x, w = b.input("x", 8), b.input("w", 4, Role.PARAM)
    v = b.view("view", b.one("f", [x, w], 16))
    y = b.one("g", [b.one("drop", [v], 16, rerun=Rerun.REPLAY_RNG, rng_bytes=2)], 4)
    gradient = b.one("g_bw", [y, v], 4, phase=Phase.BACKWARD, role=Role.GRADIENT)
    b.update("step", w, gradient)
    b.outputs.append(y)
    return b.build()


def with_op(graph: Graph, name: str, **changes: object) -> Graph:
    """The graph with some fields of one op changed, unchecked."""
    return replace(graph, ops=tuple(replace(op, **changes) if op.name == name else op for op in graph.ops))


def with_value(graph: Graph, name: str, **changes: object) -> Graph:
    return replace(graph, values=tuple(replace(v, **changes) if v.name == name else v for v in graph.values))


def with_storage(graph: Graph, index: int, **changes: object) -> Graph:
    storages = list(graph.storages)
    storages[index] = replace(storages[index], **changes)
    return replace(graph, storages=tuple(storages))


STORAGE = {name: sample().values[v].storage for name, v in VALUES.items()}
RNG_STATE = sample().ops[OPS["drop"]].rng_state
