"""Several graphs as one: their forwards in order, what the caller does, and their backwards.

Each part is a closed graph of its own: forward, `outside`, backward. In the nested graph what flows from one to another
is one storage, a gradient that comes back is the tangent of the graph before, and `outside` stands there once. A value
that is handed from graph to graph is never dropped, since no graph can make what another made: that is what the ops
`hand over` say, which may never be rerun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.ir import Graph, Op, Phase, Rerun, Role, Storage, Value
from profiler.tracing.joint import OUTSIDE_NAME
from rewriter.ways.compiled.parts import FromCall, FromGap, Part, Source


@dataclass(frozen=True, kw_only=True)
class Nested:
    """The nested graph, and where the ops and storages of each part are in it."""

    graph: Graph
    ops: tuple[dict[int, int], ...]  # per part: op of the nested graph -> op of the part
    storages: tuple[dict[int, int], ...]  # per part: storage of the part -> storage of the nested graph
    ends: tuple[int, ...]  # per part: the op that ends its forward
    parts: tuple[Part, ...]


def nest(
    parts: Sequence[Part], *, backward: Sequence[int], outside_bytes: int, gradients_leave: bool, name: str
) -> Nested:
    """The parts as one graph; `backward` is the order in which their backwards run.

    `outside_bytes` is what the caller allocates between the last forward and the first backward. Where
    `gradients_leave`, they are added to what parameters have already, and freed.
    """
    nesting = _Nesting(parts)
    for call in range(len(parts)):
        nesting.forward(call)
    nesting.outside(outside_bytes, backward)
    for call in backward:
        nesting.backward(call)
    graph = nesting.finished(name, gradients_leave=gradients_leave)
    return Nested(
        graph=graph,
        ops=tuple(nesting.op_of),
        storages=tuple(nesting.storage_of),
        ends=tuple(nesting.ends),
        parts=tuple(parts),
    )


@dataclass(frozen=True, kw_only=True)
class _Between:
    """What the caller's own code has made after a call, and what it keeps for its own backward."""

    made: frozenset[Source]
    kept: int


class _Nesting:
    """The nested graph as it grows."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.storages: list[Storage] = []
        self.value_of: list[dict[int, int]] = [{} for _ in parts]  # value of the part -> of the nested graph
        self.storage_of: list[dict[int, int]] = [{} for _ in parts]
        self.op_of: list[dict[int, int]] = [{} for _ in parts]
        self.given: dict[Source, int] = {}  # what the caller gives -> value
        self.coming_back: dict[tuple[int, int], list[int]] = {}  # (call, output) -> gradients for it
        self.for_caller: dict[Source, list[int]] = {}  # what the caller gave -> gradients for it
        self.ends: list[int] = []
        self.between: dict[int, _Between] = {}  # call -> what the caller's own code did after it

    # -- forward --------------------------------------------------------------------------------------------

    def forward(self, call: int) -> None:
        part = self.parts[call]
        self._inputs(call)
        for op in part.graph.ops:
            if op.phase is Phase.FORWARD and op.target != OUTSIDE_NAME:
                self._copy(call, op)
        self._gap(call)

    def _inputs(self, call: int) -> None:
        part = self.parts[call]
        wired = dict[int, int]()  # value of the part -> value handed over
        by_value = {v: s for v, s in zip(part.ends.inputs, part.sources, strict=True) if v is not None}
        for value in part.graph.values:
            if value.producer is not None:
                continue
            source = by_value.get(value.id)
            if isinstance(source, FromCall):
                wired[value.id] = self.value_of[source.call][self.parts[source.call].ends.outputs[source.output]]
            elif isinstance(source, FromGap) and source in self.given:
                wired[value.id] = self.given[source]
            else:
                self._given(call, value, source)
        self._hand_over(call, wired)

    def _given(self, call: int, value: Value, source: Source | None) -> None:
        if source is not None and source in self.given:
            self.value_of[call][value.id] = self.given[source]
            self.storage_of[call].setdefault(value.storage, self.values[self.given[source]].storage)
            return
        if value.storage not in self.storage_of[call]:
            self._add_storage(call, value.storage)
        base = None if value.base is None else self.value_of[call][value.base]
        made = self._add_value(call, value, producer=None, base=base)
        if source is not None:
            self.given[source] = made

    def _hand_over(self, call: int, wired: dict[int, int]) -> None:
        """Names of their own for what comes from earlier calls, made by an op that is never rerun."""
        if not wired:
            return
        op, outputs = len(self.ops), list[int]()
        for value, source in wired.items():
            local = self.parts[call].graph.values[value]
            self.storage_of[call][local.storage] = self.values[source].storage
            outputs.append(self._add_value(call, local, producer=op, base=source))
        self._add_op(f"hand over to graph {call}", tuple(wired.values()), tuple(outputs), Phase.FORWARD)

    def _gap(self, call: int) -> None:
        """The end of a call, until which its inputs and outputs were held, and what the caller does then."""
        part = self.parts[call]
        ends = (*(v for v in part.ends.inputs if v is not None), *part.ends.outputs)
        self.ends.append(len(self.ops))
        self._add_op(f"end of graph {call}", self._distinct(call, ends), (), Phase.FORWARD)
        if call == len(self.parts) - 1:
            return
        made = self._made_for(call + 1)
        kept_bytes = part.kept_bytes - sum(self.storages[self.values[v].storage].nbytes for v in made.values())
        storage = self._new_storage(max(0, kept_bytes), Role.ACTIVATION)  # of nothing, too: sizes change no structure
        kept = self._new_value(f"kept after graph {call}", storage, producer=len(self.ops))
        self.given |= made
        self.between[call] = _Between(made=frozenset(made), kept=kept)
        self._add_op(
            f"after graph {call}",
            self._distinct(call, part.ends.outputs),
            (*made.values(), kept),
            Phase.FORWARD,
            workspace_bytes=max(0, part.gap_bytes - max(0, part.kept_bytes)),
        )

    def _made_for(self, call: int) -> dict[Source, int]:
        """Values for what the caller's own code has made for a call, by the op that comes next."""
        part, made = self.parts[call], dict[Source, int]()
        for v, source in zip(part.ends.inputs, part.sources, strict=True):
            if v is None or not isinstance(source, FromGap) or source in self.given or source in made:
                continue
            value = part.graph.values[v]
            storage = self._new_storage(part.graph.storages[value.storage].nbytes, Role.ACTIVATION)
            made[source] = self._new_value(self._name(call, value.name), storage, producer=len(self.ops))
        return made

    def _distinct(self, call: int, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self.value_of[call][v] for v in values))

    # -- the turn -------------------------------------------------------------------------------------------

    def outside(self, outside_bytes: int, backward: Sequence[int]) -> None:
        """The caller's loss: it reads what graphs return and makes the tangents that no other graph makes."""
        inner = {(s.call, s.output) for call, part in enumerate(self.parts) if call in backward for s in part.sources
                 if isinstance(s, FromCall)}  # fmt: skip
        op, outputs, read = len(self.ops), list[int](), list[int]()
        for call, part in enumerate(self.parts):
            for output, tangent in zip(part.ends.used, part.ends.tangents, strict=True):
                between = call in self.between and self.between[call].made
                if (call, output) in inner or between or tangent is None or call not in backward:
                    continue
                local = part.graph.values[tangent]
                self._add_storage(call, local.storage)
                made = self._add_value(call, local, producer=op, base=None)
                outputs.append(made)
                read.append(self.value_of[call][part.ends.outputs[output]])
                self.coming_back[call, output] = [made]
        tangents = sum(self.storages[self.values[v].storage].nbytes for v in outputs)
        self._add_op(
            "outside",
            tuple(dict.fromkeys(read)),
            tuple(outputs),
            Phase.FORWARD,
            target=OUTSIDE_NAME,
            workspace_bytes=max(0, outside_bytes - tangents),
        )

    # -- backward -------------------------------------------------------------------------------------------

    def backward(self, call: int) -> None:
        part = self.parts[call]
        self._backward_between(call)
        for output, tangent in zip(part.ends.used, part.ends.tangents, strict=True):
            if tangent is not None and tangent not in self.value_of[call]:
                self._tangent(call, output, tangent)
        for op in part.graph.ops:
            if op.phase is Phase.BACKWARD:
                self._copy(call, op)
        for value, receiver in zip(part.ends.gradients, part.ends.receivers, strict=True):
            source = part.sources[receiver]
            made = self.value_of[call][value]
            if isinstance(source, FromCall):
                self.coming_back.setdefault((source.call, source.output), []).append(made)
            elif source is not None:
                self.for_caller.setdefault(source, []).append(made)

    def _backward_between(self, call: int) -> None:
        """The backward of the caller's own code after a call: it takes gradients, and makes tangents of the call."""
        between = self.between.pop(call, None)
        part = self.parts[call]
        read = list[int]() if between is None else [between.kept]
        for source in () if between is None else sorted(between.made, key=str):
            read += self.for_caller.pop(source, [])
        op, outputs = len(self.ops), list[int]()
        for output, tangent in zip(part.ends.used, part.ends.tangents, strict=True):
            if tangent is None or tangent in self.value_of[call] or self.coming_back.get((call, output)):
                continue
            local = part.graph.values[tangent]
            self._add_storage(call, local.storage)
            outputs.append(self._add_value(call, local, producer=op, base=None))
        if read or outputs:
            self._add_op(
                f"backward after graph {call}",
                tuple(dict.fromkeys(read)),
                tuple(outputs),
                Phase.BACKWARD,
                # Nobody has measured it: what its forward took.
                workspace_bytes=max(0, part.gap_bytes - part.kept_bytes) if between is not None else 0,
            )

    def _tangent(self, call: int, output: int, tangent: int) -> None:
        local = self.parts[call].graph.values[tangent]
        coming = self.coming_back[call, output]
        total = self._summed(coming, f"gradient of graph {call}")
        self.value_of[call][tangent] = total
        self.storage_of[call][local.storage] = self.values[total].storage

    def _summed(self, values: list[int], name: str) -> int:
        """What the engine makes of several gradients of one tensor."""
        total, *others = values
        for other in others:
            nbytes = self.storages[self.values[total].storage].nbytes
            storage = self._new_storage(nbytes, Role.GRADIENT)
            made = self._new_value(name, storage, producer=len(self.ops))
            own = self.values[total].base is None
            self._add_op(name, (total, other), (made,), Phase.BACKWARD, overwritable=(total,) if own else ())
            total = made
        return total

    def finished(self, name: str, *, gradients_leave: bool) -> Graph:
        outputs = list[int]()
        for number, values in enumerate(self.for_caller.values()):
            total = self._summed(values, f"gradient {number} of the caller's")
            if not gradients_leave:
                outputs.append(total)
        for call, part in enumerate(self.parts):
            outputs += [self.value_of[call][part.ends.outputs[o]] for o in sorted(part.held)]
        return Graph(
            name=name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=tuple(dict.fromkeys(outputs)),
            timing=self.parts[0].graph.timing,
        ).validate()

    # -- records --------------------------------------------------------------------------------------------

    def _copy(self, call: int, op: Op) -> None:
        graph, here = self.parts[call].graph, self.value_of[call]
        new = len(self.ops)
        for v in op.outputs:
            value = graph.values[v]
            if value.base is None:
                self._add_storage(call, value.storage)
            self._add_value(call, value, producer=new, base=None if value.base is None else here[value.base])
        if op.rng_state is not None:
            self._add_storage(call, op.rng_state)
        self.op_of[call][new] = op.id
        self.ops.append(
            replace(
                op,
                id=new,
                name=self._name(call, op.name),
                inputs=tuple(dict.fromkeys(here[v] for v in op.inputs)),
                outputs=tuple(here[v] for v in op.outputs),
                mutates=tuple(dict.fromkeys(here[v] for v in op.mutates)),
                overwritable=tuple(dict.fromkeys(here[v] for v in op.overwritable)),
                rng_state=None if op.rng_state is None else self.storage_of[call][op.rng_state],
            )
        )

    def _name(self, call: int, name: str) -> str:
        return name if len(self.parts) == 1 else f"{name} of graph {call}"

    def _add_storage(self, call: int, storage: int) -> None:
        record = self.parts[call].graph.storages[storage]
        self.storage_of[call][storage] = self._new_storage(record.nbytes, record.role)

    def _new_storage(self, nbytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role))
        return len(self.storages) - 1

    def _add_value(self, call: int, value: Value, *, producer: int | None, base: int | None) -> int:
        storage = self.storage_of[call][value.storage] if base is None else self.values[base].storage
        self.value_of[call][value.id] = self._new_value(
            self._name(call, value.name), storage, producer=producer, base=base, shape=value.shape, dtype=value.dtype
        )
        return self.value_of[call][value.id]

    def _new_value(
        self,
        name: str,
        storage: int,
        *,
        producer: int | None,
        base: int | None = None,
        shape: tuple[int, ...] = (),
        dtype: str = "",
    ) -> int:
        self.values.append(
            Value(
                id=len(self.values), name=name, storage=storage, producer=producer, base=base, shape=shape, dtype=dtype
            )
        )
        return len(self.values) - 1

    def _add_op(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        phase: Phase,
        *,
        target: str = "",
        workspace_bytes: int = 0,
        overwritable: tuple[int, ...] = (),
    ) -> None:
        self.ops.append(
            Op(
                id=len(self.ops),
                name=f"{name} ({len(self.ops)})",
                target=target or name,
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                overwritable=overwritable,
                workspace_bytes=workspace_bytes,
                rerun=Rerun.NEVER,
                never_reason="it happens between graphs, and no graph can do it again",
            )
        )
