"""The plan itself: when each activation is in memory, what is dropped, and where it is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.show.schedule_table import Executed, Kind
from bench.show.tables import aligned
from planner.analysis import candidates
from planner.explain import Choice
from planner.ir import Graph
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in which an activation is in memory; `recomputed` if a rerun made it."""

    start_ms: float
    end_ms: float
    recomputed: bool
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
    """The largest activations that a plan may drop (all, if `most` is None), in the order the forward makes them."""
    chosen = sorted(candidates(graph), key=lambda s: (-graph.storages[s].nbytes, s))[:most]
    spans = _spans(runs, frozenset(chosen))
    lines = []
    for storage in sorted(chosen, key=lambda s: (graph.maker[s] or 0, s)):
        lines.append(
            Lifeline(
                name=graph.storage_names[storage],
                module=graph.ops[graph.maker[storage] or 0].module_path,
                nbytes=graph.storages[storage].nbytes,
                choice=Choice.RECOMPUTE if any(span.recomputed for span in spans[storage]) else Choice.KEEP,
                spans=tuple(spans[storage]),
            )
        )
    return lines


def _spans(runs: Sequence[Executed], chosen: frozenset[int]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {storage: [] for storage in chosen}
    born: dict[int, Executed] = {}
    serves = _served(runs)
    for run in runs:
        born.update((storage, run) for storage in run.made if storage in chosen)
        for storage in run.freed:
            if storage in born:
                spans[storage].append(_span(born.pop(storage), run, serves))
    for storage, start in born.items():
        spans[storage].append(_span(start, runs[-1], serves))
    return spans


def _span(start: Executed, end: Executed, serves: dict[int, str]) -> Span:
    again = start.kind is Kind.RECOMPUTE
    return Span(
        start_ms=start.start_us / 1e3,
        end_ms=end.end_us / 1e3,
        recomputed=again,
        made_before=serves[start.number] if again else "",
    )


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
    return f"{head}\n\n{aligned([COLUMNS, *(lifeline_cells(line) for line in lines)])}\n"
