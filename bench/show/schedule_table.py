"""A schedule as people read it: every run with what it makes, frees and leaves in memory. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import assert_never

from bench.show.tables import aligned
from planner.ir import Graph, Op, Phase
from planner.schedule import Schedule
from planner.solve import Solution
from planner.units import human_bytes
from planner.walk import Freed, Launched, Ran, Waited, walk


class Kind(Enum):
    """Why a run stands where it does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    RECOMPUTE = "recompute"


_KINDS = {Phase.FORWARD: Kind.FORWARD, Phase.BACKWARD: Kind.BACKWARD, Phase.OPTIMIZER: Kind.OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """One run of an op, with what follows it up to the next.

    `dropped` are those of `freed` that a later run makes again, `moved` those that come back from the host; `brought`
    are the storages for which memory is taken again after this run, since their way back begins.
    """

    number: int
    op: Op
    kind: Kind
    start_us: float
    made: tuple[int, ...]  # storages that became resident
    freed: tuple[int, ...]
    dropped: tuple[int, ...]
    moved: tuple[int, ...]
    brought: tuple[int, ...]
    made_bytes: int
    after_bytes: int  # live once it and what follows it are done

    @property
    def name(self) -> str:
        """The op's name, as the rewritten graph has it."""
        return f"{self.op.name}_again" if self.kind is Kind.RECOMPUTE else self.op.name

    @property
    def end_us(self) -> float:
        return self.start_us + (0.0 if self.op.waits else self.op.time_us)


def executed(graph: Graph, schedule: Schedule) -> list[Executed]:
    """Every run of a schedule, in order."""
    groups = _groups(graph, schedule)
    return _with_drops([_executed(graph, number, ran, rest) for number, (ran, rest) in enumerate(groups, 1)])


def _groups(graph: Graph, schedule: Schedule) -> list[tuple[Ran, list[Freed | Launched | Waited]]]:
    """Each run with what follows it up to the next."""
    groups: list[tuple[Ran, list[Freed | Launched | Waited]]] = []
    for event in walk(graph, schedule):
        match event:
            case Ran():
                groups.append((event, []))
            case Freed() | Launched() | Waited():
                groups[-1][1].append(event)
            case _:
                assert_never(event)
    return groups


def _executed(graph: Graph, number: int, ran: Ran, rest: Sequence[Freed | Launched | Waited]) -> Executed:
    return Executed(
        number=number,
        op=ran.op,
        kind=Kind.RECOMPUTE if ran.again else _KINDS[ran.op.phase],
        start_us=ran.start_us,
        made=ran.made,
        freed=(*(storage for event in rest for storage in event.freed), *ran.freed),
        dropped=(),
        moved=(),
        brought=tuple(storage for event in rest for storage in event.made),
        made_bytes=sum(graph.storages[s].nbytes for s in ran.made),
        after_bytes=rest[-1].live_bytes if rest else ran.live_bytes,
    )


def _with_drops(runs: Sequence[Executed]) -> list[Executed]:
    """The same runs, each told which of its frees come back."""
    again: dict[int, bool] = {}  # storage -> whether it is from the host that it comes next
    marked = []
    for run in reversed(runs):
        again.update(dict.fromkeys(run.brought, True))
        dropped = tuple(s for s in run.freed if again.get(s) is False)
        moved = tuple(s for s in run.freed if again.get(s) is True)
        again.update(dict.fromkeys(run.made, False))
        marked.append(_marked(run, dropped, moved))
    return marked[::-1]


def _marked(run: Executed, dropped: tuple[int, ...], moved: tuple[int, ...]) -> Executed:
    return replace(run, dropped=dropped, moved=moved) if dropped or moved else run


# -- as text ------------------------------------------------------------------------------------------------------

COLUMNS = ("step", "op", "kind", "module", "makes", "live after", "frees")


def sequence_cells(graph: Graph, run: Executed) -> tuple[str, ...]:
    """A run as text, in the order of COLUMNS; what goes and comes back stands in brackets."""
    return (
        str(run.number),
        run.name,
        run.kind.value,
        run.op.module_path,
        human_bytes(run.made_bytes) if run.made else "",
        human_bytes(run.after_bytes),
        " ".join((*freed_names(graph, run), *brought_names(graph, run))),
    )


def freed_names(graph: Graph, run: Executed) -> list[str]:
    """What is freed after a run; in brackets what will be computed again, in braces what is on the host."""
    return [_freed_name(graph.storage_names[s].replace(" ", "_"), s, run) for s in run.freed]


def _freed_name(name: str, storage: int, run: Executed) -> str:
    if storage in run.moved:
        return f"{{{name}}}"
    return f"[{name}]" if storage in run.dropped else name


def brought_names(graph: Graph, run: Executed) -> list[str]:
    """What begins its way back from the host after a run."""
    return [f"+{graph.storage_names[s].replace(' ', '_')}" for s in run.brought]


def sequence_text(graph: Graph, runs: Sequence[Executed], *, title: str) -> str:
    """The executed sequence as a text table."""
    lines = [COLUMNS, *(sequence_cells(graph, run) for run in runs)]
    signs = "[name]: dropped here and computed again later"
    if any(run.brought for run in runs):
        signs += "; {name}: on the host from here on; +name: takes memory again, on its way back"
    return f"{title}\n{signs}\n\n{aligned(lines)}\n"


def plan_title(solution: Solution) -> str:
    """Model, strategy, peak and cost in one line."""
    timeline, base = solution.timeline, solution.problem.unplanned
    assert timeline is not None
    peaks = f"peak {human_bytes(timeline.peak_bytes)} instead of {human_bytes(base.peak_bytes)}"
    status = "" if timeline.peak_bytes <= solution.problem.budget_bytes else f" ({solution.status.value})"
    return f"{solution.problem.graph.name}, {solution.strategy}: {peaks}{status}, {timeline.overhead:.1%} more time"
