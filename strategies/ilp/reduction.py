"""What the optimal strategy decides about, and what it can decide beforehand: the graph in the solver's terms.

Every position is the id of an op in execution order, so several forward/backward rounds, several losses and
ops after the backward need no case of their own: all follows from where a storage is freed and needed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from planner.analysis import candidates, idle_after, rerun_reads, temporaries
from planner.ir import Graph
from planner.plan import NEVER_STAGE, rerun_stages

# Storages at most this share of what the step adds to its start are always kept (see `Reduction.small`).
SMALL_SHARE = 1e-4
NEVER = NEVER_STAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A storage that may be kept or dropped.

    `freed` is the last use before it idles; `first` and `last` bound the direct uses after that (NEVER and -1
    without any). `maker` is the node that brings it back, `readers` the nodes that read it when rerun.
    """

    storage: int
    nbytes: int
    made: int
    freed: int
    first: int
    last: int
    maker: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An op that may be rerun, with the ops merged into it.

    `blocks` are the storages it brings back. `sources` are the values that a rerun reads, as (node that makes
    the value, storage). `direct` is the first position that reads one of its values directly after it was freed
    (NEVER without one), `earliest` the first at which anything at all can ask for it.
    """

    op: int
    time_us: float
    blocks: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    direct: int
    earliest: int
    rng: tuple[tuple[int, int], ...]  # (op, bytes of its saved generator state), merged ops included
    merged: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A storage that cannot be dropped but must be held longer where a rerun reads it."""

    storage: int
    nbytes: int
    last: int
    readers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The decisions left, and everything fixed around them.

    `small` storages are kept; a solve that yields a bound has their bytes back at a price (`strategies.ilp.small`).
    `merged` storages are dropped: keeping what is made of them is never worse.
    """

    graph: Graph
    blocks: dict[int, Block]
    nodes: dict[int, Node]
    anchors: tuple[Anchor, ...]
    small: tuple[int, ...]
    merged: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing was decided beforehand."""
        return not self.small and not self.merged

    @cached_property
    def root(self) -> dict[int, int]:
        """Per op that may be rerun: the node that it is part of."""
        return {op: node.op for node in self.nodes.values() for op in node.merged}

    def dropped(self, kept: set[int]) -> list[int]:
        """The dropped storages of the plan that keeps `kept` of the blocks."""
        held = kept | set(self.small)
        return [s for s in (*candidates(self.graph), *temporaries(self.graph)) if s not in held]


def reduce(graph: Graph, *, step_bytes: int, small_share: float = SMALL_SHARE) -> Reduction:
    """The reduced problem of `graph`, whose unplanned step adds `step_bytes` to its start."""
    return _Reducer(graph, int(small_share * step_bytes)).run()


class _Reducer:
    def __init__(self, graph: Graph, small_bytes: int) -> None:
        self.graph = graph
        movable = (*candidates(graph), *temporaries(graph))
        self.small = {s for s in movable if graph.storages[s].nbytes <= small_bytes}
        self.freed = {s: idle_after(graph, s) for s in sorted(movable) if s not in self.small}
        self.alias = self._aliases()
        self.outputs = self._outputs()
        self.into: dict[int, int] = {}  # merged node -> the node that it is part of
        self.sources = {op: self._sources(op) for op in self.outputs}
        self.needs = self._direct_needs()
        self.dropped: set[int] = set()

    def run(self) -> Reduction:
        readers = self._readers()
        for storage in self.freed:
            self._merge(storage, readers)
        nodes = self._nodes()
        blocks = self._blocks(nodes)
        return Reduction(
            graph=self.graph,
            blocks=blocks,
            nodes=nodes,
            anchors=self._anchors(nodes),
            small=tuple(sorted(self.small)),
            merged=tuple(sorted(self.dropped)),
        )

    # -- values and nodes -----------------------------------------------------------------------------------

    def _aliases(self) -> list[int]:
        """Per value: the one that stands for it. Views that cost nothing, or are made in the clone, vanish."""
        graph, alias = self.graph, list(range(len(self.graph.values)))
        for value in graph.values:
            if value.base is None or value.producer is None or value.storage not in self.freed:
                continue
            op = graph.ops[value.producer]
            views = all(graph.values[v].base is not None for v in op.outputs)
            plain = op.time_us == 0 and op.inputs == (value.base,) and views
            if plain or op.id > self.freed[value.storage]:
                alias[value.id] = alias[value.base]
        return alias

    def _outputs(self) -> dict[int, tuple[int, ...]]:
        """Per op that may be rerun: the values it brings back."""
        outputs = {}
        for op in self.graph.ops:
            lost = tuple(v for v in op.outputs if self._is_lost(v, op.id))
            if lost:
                outputs[op.id] = lost
        return outputs

    def _is_lost(self, value: int, op: int) -> bool:
        return self.alias[value] == value and op <= self.freed.get(self.graph.values[value].storage, -1)

    def _sources(self, op: int) -> dict[int, None]:
        """The droppable values that a rerun of `op` reads."""
        values = self.graph.values
        reads = (self.alias[v] for v in rerun_reads(self.graph.ops[op]))
        return dict.fromkeys(v for v in reads if values[v].storage in self.freed)

    def _direct_needs(self) -> dict[int, int]:
        """Per value: its first direct reader after its storage was freed."""
        needs: dict[int, int] = {}
        for op in reversed(self.graph.ops):
            for v in op.inputs:
                if op.id > self.freed.get(self.graph.values[v].storage, NEVER):
                    needs[self.alias[v]] = op.id
        return needs

    def _readers(self) -> dict[int, list[int]]:
        """Per droppable storage: the nodes that read it when rerun."""
        readers: dict[int, list[int]] = {s: [] for s in self.freed}
        for op, sources in self.sources.items():
            for storage in dict.fromkeys(self.graph.values[v].storage for v in sources):
                readers[storage].append(op)
        return readers

    def _merge(self, storage: int, readers: dict[int, list[int]]) -> None:
        """Decide to drop `storage` where keeping the one thing made of it is never worse."""
        graph, maker = self.graph, self.graph.maker[storage]
        assert maker is not None
        values = [v for v in graph.values_in[storage] if self.alias[v] == v]
        if len(values) != 1 or len(self.outputs[maker]) != 1 or values[0] in self.needs or len(readers[storage]) != 1:
            return
        (reader,) = readers[storage]
        made = {graph.values[v].storage for v in self.outputs[reader]}
        if len(made) != 1 or len(self.outputs[reader]) != 1:
            return
        if graph.storages[made.pop()].nbytes <= graph.storages[storage].nbytes:
            self.into[maker] = reader
            self.dropped.add(storage)

    # -- the records ----------------------------------------------------------------------------------------

    def _root(self, op: int) -> int:
        while op in self.into:
            op = self.into[op]
        return op

    def _nodes(self) -> dict[int, Node]:
        """Nodes in reverse order of execution, since needs flow backwards; dead ones are left out."""
        parts: dict[int, list[int]] = {}
        for op in self.outputs:
            parts.setdefault(self._root(op), []).append(op)
        # With everything dropped, small storages too, every op is asked for as early as it ever can be.
        earliest = rerun_stages(self.graph, {*self.freed, *self.small})
        wanted: set[int] = set()
        direct: dict[int, int] = {}
        nodes: dict[int, Node] = {}
        for root in sorted(parts, reverse=True):
            own = min((self.needs.get(v, NEVER) for v in self.outputs[root]), default=NEVER)
            direct[root] = min(direct.get(root, NEVER), own)
            if own == NEVER and root not in wanted:
                continue
            node = self._node(root, parts[root], direct[root], earliest[root])
            nodes[root] = node
            for maker, storage in node.sources:
                wanted.add(maker)
                if storage in node.blocks:  # a view that costs time, in the storage it is a view of
                    direct[maker] = min(direct.get(maker, NEVER), node.direct)
        return dict(sorted(nodes.items()))

    def _node(self, root: int, parts: list[int], direct: int, earliest: int) -> Node:
        graph, values = self.graph, self.graph.values
        sources = dict.fromkeys(
            (self._root(values[v].producer or 0), values[v].storage)
            for part in parts
            for v in self.sources[part]
            if values[v].storage not in self.dropped
        )
        states = ((op, graph.ops[op].rng_state) for op in parts)
        return Node(
            op=root,
            time_us=sum(graph.ops[op].time_us for op in parts),
            blocks=tuple(dict.fromkeys(values[v].storage for v in self.outputs[root])),
            sources=tuple(sources),
            direct=direct,
            earliest=earliest,
            rng=tuple((op, graph.storages[s].nbytes) for op, s in states if s is not None),
            merged=tuple(parts),
        )

    def _blocks(self, nodes: dict[int, Node]) -> dict[int, Block]:
        readers: dict[int, list[int]] = {}
        for node in nodes.values():
            for storage in dict.fromkeys(s for _, s in node.sources):
                readers.setdefault(storage, []).append(node.op)
        blocks = {}
        for storage, freed in self.freed.items():
            maker = self.graph.maker[storage]
            if maker not in nodes or storage in self.dropped:
                continue
            later = [r for r in self.graph.readers[storage] if r > freed]
            blocks[storage] = Block(
                storage=storage,
                nbytes=self.graph.storages[storage].nbytes,
                made=maker,
                freed=freed,
                first=later[0] if later else NEVER,
                last=later[-1] if later else -1,
                maker=maker,
                readers=tuple(readers.get(storage, ())),
            )
        return blocks

    def _anchors(self, nodes: dict[int, Node]) -> tuple[Anchor, ...]:
        graph, readers = self.graph, dict[int, list[int]]()
        for node in nodes.values():
            reads = (graph.values[v].storage for op in node.merged for v in rerun_reads(graph.ops[op]))
            for storage in dict.fromkeys(reads):
                fixed = storage not in self.freed and storage not in self.small
                if fixed and storage not in graph.held_storages:
                    readers.setdefault(storage, []).append(node.op)
        return tuple(
            Anchor(
                storage=storage,
                nbytes=graph.storages[storage].nbytes,
                last=graph.readers[storage][-1],
                readers=tuple(ops),
            )
            for storage, ops in sorted(readers.items())
        )
