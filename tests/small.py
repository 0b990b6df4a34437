"""Small graphs that several tests work out by hand, and short ways to talk about them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from planner.ir import Graph, Phase, Rerun, Role
from planner.plan import Eviction
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
