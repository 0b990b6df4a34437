"""A schedule as people read it: every run with what it makes, frees and leaves in memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from planner.ir import Graph, Op, Phase
from planner.schedule import Free, Run, RunKind, Schedule
from planner.units import human_bytes


class Kind(Enum):
    """Why a run stands where it does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RECOMPUTE = "recompute"


_KINDS = {Phase.FORWARD: Kind.FORWARD, Phase.BACKWARD: Kind.BACKWARD, Phase.OPTIMIZER: Kind.OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One run of an op. `dropped` are those of `freed` that a later run makes again."""

    number: int
    op: Op
    kind: Kind
    start_us: float
    made: tuple[int, ...]  # storages that became resident
    freed: tuple[int, ...]
    dropped: tuple[int, ...]
    made_bytes: int
    after_bytes: int  # live once it and its frees are done

    @property
    def name(self) -> str:
        """The op's name, as the rewritten graph has it."""
        return f"{self.op.name}_again" if self.kind is Kind.RECOMPUTE else self.op.name

    @property
    def end_us(self) -> float:
        return self.start_us + self.op.time_us


def executed(graph: Graph, schedule: Schedule) -> list[Executed]:
    """Every run of a schedule, in order."""
    walk = _Walk(graph)
    runs = [walk.run(run, frees) for run, frees in _groups(schedule)]
    return _with_drops(runs)


def _groups(schedule: Schedule) -> Iterator[tuple[Run, list[int]]]:
    """Each run with the storages that are freed right after it."""
    run: Run | None = None
    frees: list[int] = []
    for step in schedule.steps:
        if isinstance(step, Free):
            frees.append(step.storage)
            continue
        if run is not None:
            yield run, frees
        run, frees = step, []
    if run is not None:
        yield run, frees


class _Walk:
    """What is resident, and the clock."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.resident = {value.storage for value in graph.values if value.producer is None}
        self.live_bytes = graph.start_bytes
        self.clock_us = 0.0
        self.number = 0

    def run(self, run: Run, frees: Sequence[int]) -> Executed:
        op, start_us = self.graph.ops[run.op], self.clock_us
        saved = [op.rng_state] if run.kind is RunKind.ORIGINAL_SAVING_RNG and op.rng_state is not None else []
        gone = (*frees, *([run.into] if run.into is not None else []))
        made = tuple(s for s in (*self.graph.makes[run.op], *saved) if s not in self.resident)
        self.resident |= set(made)
        self.resident -= set(gone)
        made_bytes = sum(self.graph.storages[s].nbytes for s in made)
        self.live_bytes += made_bytes - sum(self.graph.storages[s].nbytes for s in gone)
        self.clock_us += op.time_us
        self.number += 1
        return Executed(
            number=self.number,
            op=op,
            kind=Kind.RECOMPUTE if run.kind is RunKind.RERUN else _KINDS[op.phase],
            start_us=start_us,
            made=made,
            freed=gone,
            dropped=(),
            made_bytes=made_bytes,
            after_bytes=self.live_bytes,
        )


def _with_drops(runs: Sequence[Executed]) -> list[Executed]:
    """The same runs, each told which of its frees come back."""
    again: set[int] = set()
    marked = []
    for run in reversed(runs):
        dropped = tuple(s for s in run.freed if s in again)
        again |= set(run.made)
        marked.append(_marked(run, dropped))
    return marked[::-1]


def _marked(run: Executed, dropped: tuple[int, ...]) -> Executed:
    return replace(run, dropped=dropped) if dropped else run


# -- as text ------------------------------------------------------------------------------------------------------

COLUMNS = ("step", "op", "kind", "module", "makes", "live after", "frees")


def sequence_cells(graph: Graph, run: Executed) -> tuple[str, ...]:
    """A run as text, in the order of COLUMNS; what is dropped to come back stands in brackets."""
    return (
        str(run.number),
        run.name,
        run.kind.value,
        run.op.module_path,
        human_bytes(run.made_bytes) if run.made else "",
        human_bytes(run.after_bytes),
        " ".join(freed_names(graph, run)),
    )


def freed_names(graph: Graph, run: Executed) -> list[str]:
    """What is freed after a run; in brackets what will be computed again."""
    names = ((graph.storage_names[s].replace(" ", "_"), s in run.dropped) for s in run.freed)
    return [f"[{name}]" if dropped else name for name, dropped in names]


def sequence_text(graph: Graph, runs: Sequence[Executed], *, title: str) -> str:
    """The executed sequence as a text table."""
    lines = [COLUMNS, *(sequence_cells(graph, run) for run in runs)]
    return f"{title}\n[name]: dropped here and computed again later\n\n{aligned(lines)}\n"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Cells as columns of text; the last one is left ragged."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
