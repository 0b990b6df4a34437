"""The typed graph of one training step: operations, values, and the storages that take the memory.

Ids are positions: `graph.ops[i].id == i`, and likewise for values and storages. Ops stand in execution
order, so an op's id is also its rank, and "a before b" is `a.id < b.id`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
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


class CollectiveKind(Enum):
    """What processes do together."""

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    OTHER = "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Work of several processes that an op launches, or waits for: on the lane of their group, beside the ops.

    `time_us` of the op that waits is what the whole of it takes; what of that is left when it runs, it costs.
    `workspace_bytes` of the op that launches is what the processes take for themselves: at any time up to the wait.
    `storage` is what the collective writes to, and tells which launch a wait is for. `nbytes` is all that the group
    holds of it in the end (of a reduce-scatter: in the beginning), whatever one rank has.
    """

    kind: CollectiveKind
    group: str
    ranks: int
    nbytes: int
    storage: int
    waits: bool = False


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
    collective: Collective | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for a collective, whose time it then has."""
        return self.collective is not None and self.collective.waits


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
        from planner.validation import check_graph  # which needs the types of this module

        check_graph(self)
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
    def wait_of(self) -> dict[int, int]:
        """Per op that launches a collective: the op that waits for it."""
        launched: dict[int, int] = {}  # storage -> the launch that is open
        found: dict[int, int] = {}
        for op in self.ops:
            if op.collective is None:
                continue
            if not op.waits:
                launched[op.collective.storage] = op.id
            elif op.collective.storage in launched:
                found[launched.pop(op.collective.storage)] = op.id
        return found

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
        if len(time_us) != len(self.ops):
            raise GraphError(f"{self.name}: {len(time_us):,} times for {len(self.ops):,} ops")
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
