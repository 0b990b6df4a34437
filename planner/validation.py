"""Whether a graph is consistent with itself: checked once, where it enters, so that all else may rely on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.errors import GraphError
from planner.ir import Graph, Op, Rerun, Storage, Value
from planner.units import MOST_BYTES


def check_graph(graph: Graph) -> None:
    """Raise GraphError at the first op, value or storage that contradicts another."""
    _Validator(graph).run()


class _Validator:
    """One walk over a graph in execution order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.defined: set[int] = set()
        self.allocated: set[int] = set()

    def run(self) -> None:
        self._check_ids()
        self._check_storages()
        self._check_values()
        for op in self.graph.ops:
            self._check_op(op)
        self._check_collectives()
        for value in self.graph.outputs:
            if value not in self.defined:
                raise GraphError(f"the graph's output {value} is no value of it")

    def _check_ids(self) -> None:
        kinds: tuple[tuple[str, Sequence[Op | Value | Storage]], ...] = (
            ("op", self.graph.ops),
            ("value", self.graph.values),
            ("storage", self.graph.storages),
        )
        for kind, records in kinds:
            seen: set[int] = set()
            for position, record in enumerate(records):
                if record.id == position:
                    seen.add(position)
                    continue
                label = f"{kind} {getattr(record, 'name', '')!r} " if kind != "storage" else "storage "
                if record.id in seen:
                    raise GraphError(f"{label}at position {position} repeats the id {record.id}")
                raise GraphError(f"{label}at position {position} has id {record.id}; ids count from 0")

    def _check_storages(self) -> None:
        for storage in self.graph.storages:
            if storage.nbytes < 0:
                of = next((f" (of {v.name!r})" for v in self.graph.values if v.storage == storage.id), "")
                raise GraphError(f"storage {storage.id}{of} has a negative size: {storage.nbytes} bytes")
        total = sum(storage.nbytes for storage in self.graph.storages)
        if total + max((op.workspace_bytes for op in self.graph.ops), default=0) >= MOST_BYTES:
            raise GraphError(f"storages and workspaces add up to more than {MOST_BYTES:,} bytes: no memory has as many")

    def _check_values(self) -> None:
        graph = self.graph
        for value in graph.values:
            who = f"value {value.name!r}"
            if not 0 <= value.storage < len(graph.storages):
                raise GraphError(f"{who} lies in storage {value.storage}, which does not exist")
            if value.producer is not None and not 0 <= value.producer < len(graph.ops):
                raise GraphError(f"{who} is made by op {value.producer}, which does not exist")
            if value.producer is not None and value.id not in graph.ops[value.producer].outputs:
                maker = graph.ops[value.producer].name
                raise GraphError(f"{who} names op {maker!r} as its producer, which does not list it as output")
            if value.base is not None and not 0 <= value.base < len(graph.values):
                raise GraphError(f"{who} is a view of value {value.base}, which does not exist")
            if value.base is not None and graph.values[value.base].storage != value.storage:
                base = graph.values[value.base].name
                raise GraphError(f"{who} is a view of {base!r} but lies in another storage")
            if value.producer is None:
                self.defined.add(value.id)
                self.allocated.add(value.storage)

    def _check_op(self, op: Op) -> None:
        self._check_numbers(op)
        for value in (*op.inputs, *op.outputs, *op.mutates, *op.overwritable):
            if not 0 <= value < len(self.graph.values):
                raise GraphError(f"op {op.name!r} refers to value {value}, which does not exist")
        for value in op.inputs:
            if value not in self.defined:
                raise GraphError(f"op {op.name!r} uses {self._name(value)} before it is defined")
        for kind, values in (("mutates", op.mutates), ("could overwrite", op.overwritable)):
            for value in values:
                if value not in op.inputs:
                    raise GraphError(f"op {op.name!r} {kind} {self._name(value)}, which is not its input")
        for value in op.outputs:
            self._check_output(op, value)
        self._check_rerun(op)

    def _check_numbers(self, op: Op) -> None:
        if not 0 <= op.time_us < math.inf:
            raise GraphError(f"op {op.name!r} has a negative or undefined time: {op.time_us} µs")
        if op.workspace_bytes < 0:
            raise GraphError(f"op {op.name!r} has a negative workspace: {op.workspace_bytes} bytes")
        if op.round < 0:
            raise GraphError(f"op {op.name!r} has a negative round: {op.round}")

    def _check_output(self, op: Op, value_id: int) -> None:
        value = self.graph.values[value_id]
        if value.producer != op.id:
            raise GraphError(f"op {op.name!r} lists the output {value.name!r}, made by op {value.producer}")
        if value_id in self.defined:
            raise GraphError(f"op {op.name!r} defines {value.name!r} a second time")
        if value.base is not None and value.base not in self.defined:
            raise GraphError(f"op {op.name!r} makes a view of {self._name(value.base)}, which is not there yet")
        if value.base is not None and value.base not in (*op.inputs, *op.outputs):
            raise GraphError(f"op {op.name!r} makes a view of {self._name(value.base)} without reading it")
        if value.base is None and value.storage in self.allocated:
            raise GraphError(
                f"op {op.name!r} makes {value.name!r} in storage {value.storage}, which is taken: "
                "say which value it is a view of"
            )
        self.defined.add(value_id)
        self.allocated.add(value.storage)

    def _check_collectives(self) -> None:
        """Every collective is launched by one op and waited for by a later one."""
        waits = set(self.graph.wait_of.values())
        for op in self.graph.ops:
            if op.collective is None:
                continue
            if not 0 <= op.collective.storage < len(self.graph.storages):
                raise GraphError(f"op {op.name!r} communicates storage {op.collective.storage}, which does not exist")
            if op.id not in (waits if op.waits else self.graph.wait_of):
                missing = "launched" if op.waits else "waited for"
                raise GraphError(f"the collective of op {op.name!r} is never {missing}")

    def _check_rerun(self, op: Op) -> None:
        if op.rerun is Rerun.NEVER and not op.never_reason:
            raise GraphError(f"op {op.name!r} may never be rerun, but gives no reason")
        if op.rerun in (Rerun.FREELY, Rerun.REPLAY_RNG) and op.mutates:
            raise GraphError(
                f"op {op.name!r} mutates {self._name(op.mutates[0])}, so it cannot be rerun {op.rerun.value}"
            )
        if (op.rng_state is not None) != (op.rerun is Rerun.REPLAY_RNG):
            raise GraphError(f"op {op.name!r}: a saved generator state goes with rerun=replay_rng, and only with it")
        if op.rng_state is None:
            return
        if not 0 <= op.rng_state < len(self.graph.storages):
            raise GraphError(f"op {op.name!r} saves its generator in storage {op.rng_state}, which does not exist")
        if op.rng_state in self.allocated:
            raise GraphError(f"op {op.name!r} saves its generator in storage {op.rng_state}, which is taken")
        self.allocated.add(op.rng_state)

    def _name(self, value: int) -> str:
        return f"value {self.graph.values[value].name!r}"
