"""A plan as a table: per activation CHECKPOINT, RECOMPUTE or OFFLOAD, as μ-TWO's users expect it, and as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from planner import files
from planner.analysis import candidates, liveness
from planner.explain import Choice
from planner.ir import Graph, Role
from planner.plan import Eviction, Plan, Restore, recompute_us

COLUMNS = ("name", "module", "bytes", "decision", "recompute_us", "free_after", "restore_before")
DECISIONS = {Choice.KEEP: "CHECKPOINT", Choice.RECOMPUTE: "RECOMPUTE", Choice.OFFLOAD: "OFFLOAD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One activation. `recompute_us` is what bringing it back costs from what the plan keeps; None where it cannot be.

    `free_after` and `restore_before` name an op for each eviction; the latter one fewer where it never comes back.
    """

    name: str
    module: str
    nbytes: int
    choice: Choice
    recompute_us: float | None
    free_after: tuple[str, ...]
    restore_before: tuple[str, ...]


def plan_rows(graph: Graph, plan: Plan) -> list[PlanRow]:
    """A row for every activation that the backward reads, in id order."""
    evictions: dict[int, list[Eviction]] = {}
    for eviction in plan.evictions:
        evictions.setdefault(eviction.storage, []).append(eviction)
    read_again = (
        s for s in graph.storages if s.role is Role.ACTIVATION and liveness(graph)[s.id].idle_until is not None
    )
    free = frozenset(candidates(graph))
    dropped = frozenset(e.storage for e in plan.evictions if e.how is Restore.RECOMPUTE)
    return [_row(graph, s.id, evictions.get(s.id, []), dropped, recomputable=s.id in free) for s in read_again]


def _row(graph: Graph, storage: int, gone: list[Eviction], dropped: frozenset[int], *, recomputable: bool) -> PlanRow:
    made = graph.maker[storage]
    assert made is not None, "only what is made in the forward idles until the backward"
    back = [e.restore_before for e in gone if e.restore_before is not None]
    return PlanRow(
        name=graph.storage_names[storage],
        module=graph.ops[made].module_path,
        nbytes=graph.storages[storage].nbytes,
        choice=_choice(gone),
        recompute_us=recompute_us(graph, storage, dropped) if recomputable else None,
        free_after=tuple(graph.ops[e.free_after].name for e in gone),
        restore_before=tuple(graph.ops[op].name for op in back),
    )


def _choice(gone: list[Eviction]) -> Choice:
    if any(e.how is Restore.OFFLOAD for e in gone):
        return Choice.OFFLOAD
    return Choice.RECOMPUTE if gone else Choice.KEEP


def cells(row: PlanRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    cost = "" if row.recompute_us is None else str(row.recompute_us)
    places = (" ".join(row.free_after), " ".join(row.restore_before))
    return (row.name, row.module, str(row.nbytes), DECISIONS[row.choice], cost, *places)


def write_plan_csv(path: str | Path, graph: Graph, plan: Plan) -> None:
    """The table as a CSV file, whole or not at all; FileFormatError where it cannot be written."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([COLUMNS, *(cells(row) for row in plan_rows(graph, plan))])
    files.write_whole(path, text.getvalue())
