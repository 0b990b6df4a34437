"""Hypothesis strategies that draw small training steps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from planner.analysis import candidates, movable
from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.ir import Graph, Phase, Rerun, Role
from planner.placement import Move
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


# One draw a layer, of few and plain parts: drawing takes longer than what most tests do with the network.
_LAYERS = st.tuples(
    st.sampled_from(_KINDS),
    st.integers(1, 31),  # which of the last five values it reads, as bits
    st.integers(0, 60),  # bytes
    st.integers(0, 9),  # µs
    st.integers(0, 20),  # bytes of workspace
    st.integers(0, 7),  # saves its input, saves its output, has a parameter, as bits
)


@st.composite
def networks(draw: st.DrawFn, max_layers: int = 12) -> Graph:
    """A random network: any shape, every kind of op, shared parameters, one or two rounds."""
    net = Network("random")
    shared = net.build.input("shared_w", 12, Role.PARAM)
    rounds = draw(st.lists(st.lists(_LAYERS, min_size=1, max_size=max_layers), min_size=1, max_size=2))
    for r, layers in enumerate(rounds):
        made = [net.x]
        for i, layer in enumerate(layers):
            made.append(_add_layer(net, f"r{r}_{i}", made, shared, *layer))
        last = net.layer(f"r{r}_loss", [made[-1]], 1)
        net.build.outputs.append(last)
        net.backward(last, optimizer=False)
    for i, value in enumerate(list(net.build.values)):
        if net.build.storages[value.storage].role is Role.PARAM:
            net.build.op(f"sgd{i}", [value.id], [], phase=Phase.OPTIMIZER, rerun=Rerun.NEVER, mutates=(value.id,))
    return net.build.build()


def _add_layer(
    net: Network,
    name: str,
    made: list[int],
    shared: int,
    kind: str,
    read: int,
    nbytes: int,
    us: int,
    workspace: int,
    flags: int,
) -> int:
    near = made[-5:]
    picks = [v for i, v in enumerate(near) if read >> i & 1][:3] or [near[read % len(near)]]
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
        "time_us": float(us),
        "workspace_bytes": workspace,
        "saves_input": bool(flags & 1),
        "saves_output": bool(flags & 2),
        "param_bytes": 10 if flags & 4 else 0,
    }
    if kind == "multi":
        options["extra_sizes"] = (nbytes // 2, workspace)
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
    chosen = draw(st.integers(0, 2 ** len(free) - 1))
    return graph, [s for i, s in enumerate(free) if chosen >> i & 1]


@st.composite
def networks_with_moves(draw: st.DrawFn, max_layers: int = 12) -> tuple[Graph, Incremental, tuple[Move, ...]]:
    """A random network, a state that drops some of its activations, and others moved between any valid boundaries."""
    graph, dropped = draw(networks_with_drops(max_layers))
    state = Incremental(graph, dropped, in_place=draw(st.booleans()))
    moves = []
    for storage in movable(graph):
        after, need = state.freed_after(storage), state.need(storage)
        if state.is_dropped(storage) or need <= after or not draw(st.booleans()):
            continue
        gone = draw(st.integers(after + 1, need))
        back = draw(st.integers(gone, need))
        moves.append(Move(storage, graph.storages[storage].nbytes, after, need, gone, back))
    return graph, state, tuple(moves)


def links() -> st.SearchStrategy[HostLink]:
    """Links from hopeless to instant for graphs of so few bytes."""
    speeds = st.sampled_from((1e5, 1e6, 1e7, 1e9))
    return st.builds(
        HostLink, out_bytes_per_s=speeds, in_bytes_per_s=speeds, latency_us=st.sampled_from((0.0, 0.5, 20.0))
    )
