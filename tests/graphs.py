"""Hypothesis strategies that draw small training steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from planner.analysis import candidates
from planner.ir import Graph, Phase, Rerun, Role
from planner.synthetic import Network, batch_norm, dropout

_KINDS = (
    "plain",
    "plain",
    "plain",
    "view",
    "foreign_view",
    "batch_norm",
    "dropout",
    "multi",
    "never",
    "overwrite",
    "shared",
)


@st.composite
def networks(draw: st.DrawFn, max_layers: int = 12) -> Graph:
    """A random network: any shape, every kind of op, shared parameters, one or two rounds."""
    net = Network("random")
    shared = net.build.input("shared_w", 12, Role.PARAM)
    for r in range(draw(st.integers(1, 2))):
        made = [net.x]
        for i in range(draw(st.integers(1, max_layers))):
            made.append(_random_layer(draw, net, f"r{r}_{i}", made, shared))
        last = net.layer(f"r{r}_loss", [made[-1]], 1)
        net.build.outputs.append(last)
        net.backward(last, optimizer=False)
    for i, value in enumerate(list(net.build.values)):
        if net.build.storages[value.storage].role is Role.PARAM:
            net.build.op(f"sgd{i}", [value.id], [], phase=Phase.OPTIMIZER, rerun=Rerun.NEVER, mutates=(value.id,))
    return net.build.build()


def _random_layer(draw: st.DrawFn, net: Network, name: str, made: list[int], shared: int) -> int:
    kind = draw(st.sampled_from(_KINDS))
    picks = draw(st.lists(st.sampled_from(made[-5:]), min_size=1, max_size=3, unique=True))
    nbytes, time_us = draw(st.integers(0, 60)), float(draw(st.integers(0, 9)))
    if kind == "view":
        return net.view(name, picks[0])
    if kind == "foreign_view":
        value = net.view(name, picks[0])
        net.build.ops[-1] = replace(net.build.ops[-1], rerun=Rerun.NEVER, never_reason="it calls foreign code")
        return value
    if kind == "batch_norm":
        return batch_norm(net, name, picks[0], nbytes)
    if kind == "dropout":
        return dropout(net, name, picks[0], nbytes)
    options: dict = {
        "time_us": time_us,
        "workspace_bytes": draw(st.integers(0, 20)),
        "saves_input": draw(st.booleans()),
        "saves_output": draw(st.booleans()),
        "param_bytes": draw(st.sampled_from((0, 10))),
    }
    if kind == "multi":
        options["extra_sizes"] = (draw(st.integers(0, 30)), draw(st.integers(0, 30)))
    if kind == "never":
        options["rerun"] = Rerun.NEVER
    if kind == "shared":
        options["param"] = shared
    if kind == "overwrite":
        options["overwritable"] = (picks[0],)
        nbytes = net.build.storages[net.build.values[picks[0]].storage].nbytes
    return net.layer(name, picks, nbytes, **options)


@st.composite
def networks_with_drops(draw: st.DrawFn, max_layers: int = 12) -> tuple[Graph, list[int]]:
    """A random network and a random set of its activations to drop."""
    graph = draw(networks(max_layers))
    free = candidates(graph)
    return graph, [s for s in free if draw(st.booleans())]
