"""The typed graph of one training step: operations, values, and the storages that take the memory.

Ids are positions: `graph.ops[i].id == i`, and likewise for values and storages. Ops stand in execution
order, so an op's id is also its rank, and "a before b" is `a.id < b.id`.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TypeVar, cast

from planner import files
from planner.errors import FileFormatError, GraphError

GRAPH_SCHEMA = 1
T = TypeVar("T")


class Phase(Enum):
    """Which part of the training step an op belongs to (μ-TWO's `gtype`, with the optimizer added)."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(Enum):
    """What a storage is for."""

    INPUT = "input"
    PARAM = "param"
    BUFFER = "buffer"
    OPT_STATE = "opt_state"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TEMP = "temp"
    OUTPUT = "output"


class Rerun(Enum):
    """How an op may be run a second time.

    FREELY: it is a pure function. WITHOUT_SIDE_EFFECT: the second run leaves out what it mutates, and does
    not read it either (a batch norm without its running statistics). REPLAY_RNG: the generator's state is
    saved at the first run and replayed. NEVER: `Op.never_reason` says why.
    """

    FREELY = "freely"
    WITHOUT_SIDE_EFFECT = "without_side_effect"
    REPLAY_RNG = "replay_rng"
    NEVER = "never"


class TimingKind(Enum):
    """Where the times of a graph come from."""

    MEASURED = "measured on"
    ESTIMATED = "estimated for"
    MADE_UP = "made up for"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The origin of `Op.time_us`: printed wherever a time is."""

    kind: TimingKind = TimingKind.MADE_UP
    device: str = "a synthetic graph"

    def __str__(self) -> str:
        return f"{self.kind.value} {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A block of memory: the unit of allocation and of eviction."""

    id: int
    nbytes: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor. One with a `base` is a view of it, or what an in-place op returns: it shares its storage."""

    id: int
    name: str
    storage: int
    producer: int | None = None
    base: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation at one place of the step's execution order.

    `mutates` are the inputs it writes to. `overwritable` are the inputs whose memory an in-place form of it
    could write its only output to, wherever the schedule finds them dead (see `planner.schedule.lower`).
    `rng_state` is the storage that holds the saved generator state of a REPLAY_RNG op.
    """

    id: int
    name: str
    target: str
    phase: Phase
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    round: int = 0
    mutates: tuple[int, ...] = ()
    overwritable: tuple[int, ...] = ()
    time_us: float = 0.0
    workspace_bytes: int = 0
    rerun: Rerun = Rerun.FREELY
    never_reason: str = ""
    rng_state: int | None = None
    module_path: str = ""
    source_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """When a storage is made and used, in ids of ops; None where there is no such use.

    `idle_after` and `idle_until` bound the gap that an eviction would use: the last use before the first
    backward op that follows its making, and the next use. None for what is not made in the forward, or not
    used again after that turn. `inactive_us` is the run time between them.
    """

    storage: int
    created_at: int | None
    first_fw_access: int | None
    last_fw_access: int | None
    first_bw_access: int | None
    last_bw_access: int | None
    last_access: int | None
    idle_after: int | None
    idle_until: int | None
    inactive_us: float


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A whole training step. Call `validate()` wherever one enters; all else assumes that it passed."""

    name: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    outputs: tuple[int, ...]
    timing: Timing = Timing()

    # -- checks ---------------------------------------------------------------------------------------------

    def validate(self) -> Graph:
        """Return the graph itself, or raise GraphError naming the first op or value that is wrong."""
        _Validator(self).run()
        return self

    # -- derived tables -------------------------------------------------------------------------------------

    @cached_property
    def maker(self) -> tuple[int | None, ...]:
        """Per storage: the op that allocates it, or None for what is live before the step."""
        makers: list[int | None] = [None] * len(self.storages)
        for value in self.values:
            if value.producer is not None and value.base is None:
                makers[value.storage] = value.producer
        return tuple(makers)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage: the ops that read it, through any of its values, in execution order."""
        readers: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for storage in self.reads[op.id]:
                readers[storage].append(op.id)
        return tuple(map(tuple, readers))

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per op: the storages that it reads, each once."""
        return tuple(tuple(dict.fromkeys(self.values[v].storage for v in op.inputs)) for op in self.ops)

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """Per op: the storages that it allocates; empty for views and in-place ops."""
        return tuple(
            tuple(self.values[v].storage for v in op.outputs if self.values[v].base is None) for op in self.ops
        )

    @cached_property
    def writers(self) -> tuple[tuple[int, ...], ...]:
        """Per storage: the ops that mutate it after it was made."""
        writers: list[list[int]] = [[] for _ in self.storages]
        for op in self.ops:
            for storage in dict.fromkeys(self.values[v].storage for v in op.mutates):
                writers[storage].append(op.id)
        return tuple(map(tuple, writers))

    @cached_property
    def values_in(self) -> tuple[tuple[int, ...], ...]:
        """Per storage: the values that lie in it."""
        values: list[list[int]] = [[] for _ in self.storages]
        for value in self.values:
            values[value.storage].append(value.id)
        return tuple(map(tuple, values))

    @cached_property
    def held_storages(self) -> frozenset[int]:
        """Storages that outlive the step: what was live before it, and its outputs. Never freed by it."""
        inputs = {v.storage for v in self.values if v.producer is None}
        return frozenset(inputs | {self.values[v].storage for v in self.outputs})

    @cached_property
    def start_bytes(self) -> int:
        """What is live before the step."""
        inputs = {v.storage for v in self.values if v.producer is None}
        return sum(self.storages[s].nbytes for s in inputs)

    @cached_property
    def time_us(self) -> float:
        """Run time of the step with every op run once."""
        return sum(op.time_us for op in self.ops)

    @cached_property
    def elapsed_us(self) -> tuple[float, ...]:
        """Per op: the time at which it starts; one more entry for the end of the step."""
        return tuple(accumulate((op.time_us for op in self.ops), initial=0.0))

    @cached_property
    def liveness(self) -> tuple[Liveness, ...]:
        """Per storage: when it is made and used."""
        return tuple(self._liveness(storage.id) for storage in self.storages)

    def _liveness(self, storage: int) -> Liveness:
        uses, made = self.readers[storage], self.maker[storage]
        forward = [u for u in uses if self.ops[u].phase is Phase.FORWARD]
        backward = [u for u in uses if self.ops[u].phase is Phase.BACKWARD]
        idle_after, idle_until = self._idle_gap(storage)
        inactive = 0.0
        if idle_after is not None and idle_until is not None:
            inactive = self.elapsed_us[idle_until] - self.elapsed_us[idle_after + 1]
        return Liveness(
            storage=storage,
            created_at=made,
            first_fw_access=forward[0] if forward else None,
            last_fw_access=forward[-1] if forward else None,
            first_bw_access=backward[0] if backward else None,
            last_bw_access=backward[-1] if backward else None,
            last_access=uses[-1] if uses else None,
            idle_after=idle_after,
            idle_until=idle_until,
            inactive_us=max(inactive, 0.0),
        )

    def _idle_gap(self, storage: int) -> tuple[int | None, int | None]:
        made = self.maker[storage]
        if made is None or self.ops[made].phase is not Phase.FORWARD:
            return None, None
        first = bisect_left(self._backward_ops, made)
        if first == len(self._backward_ops):
            return None, None
        turn, uses = self._backward_ops[first], self.readers[storage]
        split = bisect_left(uses, turn)
        if split == len(uses):
            return None, None
        # A storage nobody reads before the backward idles from the moment it is made.
        return (uses[split - 1] if split else made), uses[split]

    @cached_property
    def _backward_ops(self) -> tuple[int, ...]:
        return tuple(op.id for op in self.ops if op.phase is Phase.BACKWARD)

    def derived(self, analysis: Callable[[Graph], T]) -> T:
        """`analysis(self)`, computed once: a graph never changes."""
        known: dict[Callable[[Graph], object], object] = self.__dict__.setdefault("_derived", {})
        if analysis not in known:
            known[analysis] = analysis(self)
        return cast(T, known[analysis])

    @cached_property
    def storage_names(self) -> tuple[str, ...]:
        """Per storage: the name of the value it was made for."""
        names = [f"storage {s.id}" for s in self.storages]
        for value in reversed(self.values):
            names[value.storage] = value.name
        for op in self.ops:
            if op.rng_state is not None:
                names[op.rng_state] = f"{op.name} (saved generator state)"
        return tuple(names)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of structure, shapes and dtypes, never of times: what a saved plan must match."""
        rows = [
            [
                (
                    o.name,
                    o.target,
                    o.phase.value,
                    o.round,
                    o.inputs,
                    o.outputs,
                    o.mutates,
                    o.overwritable,
                    o.rerun.value,
                    o.rng_state,
                )
                for o in self.ops
            ],
            [[v.storage, v.producer, v.base, v.shape, v.dtype] for v in self.values],
            [[s.nbytes, s.role.value] for s in self.storages],
            self.outputs,
        ]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def with_times(self, time_us: tuple[float, ...], *, timing: Timing) -> Graph:
        """The same graph with other op times, and where they came from."""
        ops = tuple(replace(op, time_us=t) for op, t in zip(self.ops, time_us, strict=True))
        return replace(self, ops=ops, timing=timing).validate()

    # -- files ----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON; `Graph.load` gives back an equal one."""
        files.save(path, kind="graph", schema=GRAPH_SCHEMA, record=self)

    @staticmethod
    def load(path: str | Path) -> Graph:
        """Read and validate a saved graph; FileFormatError says what is wrong with the file."""
        graph = files.load(path, kind="graph", schema=GRAPH_SCHEMA, cls=Graph)
        try:
            return graph.validate()
        except GraphError as error:
            raise FileFormatError(f"{path}: {error}") from None


class _Validator:
    """One walk over a graph in execution order; raises at the first contradiction."""

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
                label = f"{kind} {getattr(record, 'name', '')!r} " if kind != "storage" else "storage "
                if record.id in seen:
                    raise GraphError(f"{label}at position {position} repeats the id {record.id}")
                if record.id != position:
                    raise GraphError(f"{label}at position {position} has id {record.id}; ids count from 0")
                seen.add(record.id)

    def _check_storages(self) -> None:
        for storage in self.graph.storages:
            if storage.nbytes < 0:
                of = next((f" (of {v.name!r})" for v in self.graph.values if v.storage == storage.id), "")
                raise GraphError(f"storage {storage.id}{of} has a negative size: {storage.nbytes} bytes")

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
