"""The plan itself: when each activation is in memory, what is dropped or moved, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.show.schedule_table import Executed, Kind
from bench.show.tables import aligned
from planner.analysis import candidates, movable
from planner.explain import Choice
from planner.ir import Graph
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in which an activation is in memory; `recomputed` or `brought` if it was there before."""

    start_ms: float
    end_ms: float
    recomputed: bool
    brought: bool
    made_before: str  # the op of the step that a recomputation serves; "" for the first making


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifeline:
    """One activation over the executed schedule."""

    name: str
    module: str
    nbytes: int
    choice: Choice
    spans: tuple[Span, ...]


def lifelines(graph: Graph, runs: Sequence[Executed], *, most: int | None = None) -> list[Lifeline]:
    """The largest activations that a plan may evict (all, if `most` is None), in the order the forward makes them.

    What can only be moved to the host is among them where the plan moves it.
    """
    brought = {storage for run in runs for storage in run.brought}
    offered = {*candidates(graph), *(s for s in movable(graph) if s in brought)}
    chosen = sorted(offered, key=lambda s: (-graph.storages[s].nbytes, s))[:most]
    spans = _spans(runs, frozenset(chosen))
    lines = []
    for storage in sorted(chosen, key=lambda s: (graph.maker[s] or 0, s)):
        lines.append(
            Lifeline(
                name=graph.storage_names[storage],
                module=graph.ops[graph.maker[storage] or 0].module_path,
                nbytes=graph.storages[storage].nbytes,
                choice=_choice(spans[storage]),
                spans=tuple(spans[storage]),
            )
        )
    return lines


def _choice(spans: Sequence[Span]) -> Choice:
    if any(span.brought for span in spans):
        return Choice.OFFLOAD
    return Choice.RECOMPUTE if any(span.recomputed for span in spans) else Choice.KEEP


def _spans(runs: Sequence[Executed], chosen: frozenset[int]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {storage: [] for storage in chosen}
    born: dict[int, Span] = {}  # with its end still open
    serves = _served(runs)
    for run in runs:
        born.update((storage, _made(run, serves)) for storage in run.made if storage in chosen)
        for storage in run.freed:
            if storage in born:
                spans[storage].append(replace(born.pop(storage), end_ms=run.end_us / 1e3))
        born.update((storage, _brought(run)) for storage in run.brought if storage in chosen)
    for storage, span in born.items():
        spans[storage].append(replace(span, end_ms=runs[-1].end_us / 1e3))
    return spans


def _made(run: Executed, serves: dict[int, str]) -> Span:
    again, start_ms = run.kind is Kind.RECOMPUTE, run.start_us / 1e3
    served = serves[run.number] if again else ""
    return Span(start_ms=start_ms, end_ms=start_ms, recomputed=again, brought=False, made_before=served)


def _brought(run: Executed) -> Span:
    start_ms = run.end_us / 1e3
    return Span(start_ms=start_ms, end_ms=start_ms, recomputed=False, brought=True, made_before="")


def _served(runs: Sequence[Executed]) -> dict[int, str]:
    """Per recomputation: the next op of the step itself."""
    served, following = dict[int, str](), ""
    for run in reversed(runs):
        if run.kind is Kind.RECOMPUTE:
            served[run.number] = following
        else:
            following = run.op.name
    return served


COLUMNS = ("activation", "module", "size", "plan", "in memory (ms)", "recomputed before")


def lifeline_cells(line: Lifeline) -> tuple[str, ...]:
    """A life-line as text, in the order of COLUMNS."""
    spans = ", ".join(f"{span.start_ms:.1f}-{span.end_ms:.1f}" for span in line.spans)
    again = ", ".join(span.made_before for span in line.spans if span.recomputed)
    return (line.name, line.module, human_bytes(line.nbytes), line.choice.value, spans, again)


def plan_text(lines: Sequence[Lifeline], *, title: str) -> str:
    """Every activation that a plan may drop, as a text table."""
    dropped = [line for line in lines if line.choice is Choice.RECOMPUTE]
    size = human_bytes(sum(line.nbytes for line in dropped))
    total = human_bytes(sum(line.nbytes for line in lines))
    head = f"{title}\n{len(dropped)} of {len(lines)} activations are dropped and computed again: {size} of {total}"
    moved = [line for line in lines if line.choice is Choice.OFFLOAD]
    if moved:
        head += f"; {len(moved)} are moved to the host: {human_bytes(sum(line.nbytes for line in moved))}"
    return f"{head}\n\n{aligned([COLUMNS, *(lifeline_cells(line) for line in lines)])}\n"
