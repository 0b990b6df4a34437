"""Communication beside computation: launches moved earlier and waits later, while memory allows it.

A pass over a finished schedule. What runs stays the same; where a gather is launched and where a collective is waited
for changes, so far that ops hide it. Bytes follow from the order alone, and the simulator has the last word.

The order is one of runs, not of steps: ranks that run one plan free and overwrite what their own sizes allow, and still
share it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from planner.analysis import rerun_reads
from planner.errors import PlanError
from planner.ir import CollectiveKind, Graph, Op
from planner.schedule import Free, Launch, Run, RunKind, Schedule, Step, Wait, Work
from planner.simulator import Timeline, simulate

Order = tuple[int, ...]  # positions in the old sequence of runs

_WORTH_IT = 1e-6  # of the step's time
_COPIES = ("aten.clone.", "aten._to_copy.")


class Piece:
    """One run, with the steps that belong to it: what it waits for, what it launches, what is freed after it."""

    __slots__ = ("after", "before", "freed", "op", "peak_bytes", "run", "time_us", "touched", "written")

    def __init__(self, graph: Graph, before: list[Step], run: Run) -> None:
        self.before = before
        self.run = run
        self.after: list[Step] = []
        self.op: Op = graph.ops[run.op]
        values, again = graph.values, run.kind is RunKind.RERUN
        reads = rerun_reads(self.op) if again else self.op.inputs
        self.written = {values[v].storage for v in (() if again else self.op.mutates)}
        self.touched = {values[v].storage for v in (*reads, *self.op.outputs)} | self.written
        self.freed: set[int] = set()
        if run.into is not None:
            self.written.add(run.into)
            self.freed.add(run.into)
        self.time_us = 0.0 if self.op.waits else self.op.time_us
        self.peak_bytes = 0

    @property
    def steps(self) -> list[Step]:
        return [*self.before, self.run, *self.after]

    @property
    def launches(self) -> bool:
        return self.op.collective is not None and not self.op.waits

    def makes_nothing(self, graph: Graph) -> bool:
        """Whether it only makes another name for memory that is there."""
        return not graph.makes[self.op.id] and not self.written and self.op.collective is None and not self.before

    @property
    def moves_data(self) -> bool:
        """Whether a copy to or from the host goes with it: such a piece stays where it is."""
        return any(isinstance(s, Launch | Wait) and s.lane.work is not Work.COLLECTIVE for s in self.steps)


def pieces_of(graph: Graph, schedule: Schedule) -> list[Piece]:
    """The schedule run by run."""
    pieces: list[Piece] = []
    before: list[Step] = []
    for step in schedule.steps:
        if isinstance(step, Run):
            pieces.append(Piece(graph, before, step))
            before = []
        elif before or not pieces or not _follows(step):
            before.append(step)
        else:
            pieces[-1].after.append(step)
            if isinstance(step, Free):
                pieces[-1].freed.add(step.storage)
    assert not before, "a schedule ends with a run and what follows it"
    return pieces


def _follows(step: Step) -> bool:
    """Whether a step belongs to the run before it."""
    match step:
        case Free():
            return True
        case Launch():
            return step.lane.work is not Work.COPY_IN
        case _:
            return False


def reordered(graph: Graph, schedule: Schedule, order: Order) -> Schedule:
    """The same runs in another order, each with what belongs to it."""
    pieces = pieces_of(graph, schedule)
    return replace(schedule, steps=tuple(step for i in order for step in pieces[i].steps))


def overlapping(graph: Graph, schedule: Schedule, *, budget_bytes: int, barriers: Collection[int] = ()) -> Order | None:
    """An order in which less time is spent waiting for collectives, within the budget; None where none was found.

    Nothing is moved across the ops that are `barriers`.
    """
    if not graph.wait_of:
        return None
    pass_ = _Pass(graph, schedule, budget_bytes, barriers)
    pass_.run()
    order = tuple(pass_.order)
    if order == tuple(range(len(order))):
        return None
    try:
        found = simulate(graph, reordered(graph, schedule, order))
    except PlanError:  # an order that cannot be: the old one stays
        return None
    was = pass_.timeline
    is_better = found.time_us < was.time_us * (1 - _WORTH_IT) and found.peak_bytes <= max(budget_bytes, was.peak_bytes)
    return order if is_better else None


class _Pass:
    """One schedule on its way to another order: `order` has pieces, `peaks` the bytes live while each of them runs."""

    def __init__(self, graph: Graph, schedule: Schedule, budget_bytes: int, barriers: Collection[int]) -> None:
        self.graph = graph
        self.barriers = frozenset(barriers)
        self.budget_bytes = budget_bytes
        self.pieces = pieces_of(graph, schedule)
        self.timeline: Timeline = simulate(graph, schedule)
        bytes_at = iter(self.timeline.bytes_at)
        for piece in self.pieces:
            piece.peak_bytes = max(next(bytes_at) for _ in piece.steps)
        self.launch_of, self.wait_of = self._pairs()
        self.order = list(range(len(self.pieces)))
        self.peaks = [piece.peak_bytes for piece in self.pieces]

    def _pairs(self) -> tuple[dict[int, int], dict[int, int]]:
        """Per piece that waits for a collective the one that launches it, and the other way round."""
        open_work: dict[int, int] = {}  # by what it writes to
        launches: dict[int, int] = {}
        for i, piece in enumerate(self.pieces):
            work = piece.op.collective
            if work is not None and not work.waits:
                open_work[work.storage] = i
            elif work is not None and work.storage in open_work:
                launches[i] = open_work.pop(work.storage)
        return launches, {launch: wait for wait, launch in launches.items()}

    def run(self) -> None:
        for piece in [i for i, piece in enumerate(self.pieces) if piece.op.waits]:
            self._sink(piece)
        self._hoist_all()

    # -- waits later --------------------------------------------------------------------------------------------------

    def _sink(self, wait: int) -> None:
        """Move a wait, and views and copies of what it waits for, to just before their first other use."""
        work = self.pieces[wait].op.collective
        assert work is not None
        at = self.order.index(wait)
        if wait not in self.launch_of or self.pieces[wait].moves_data:
            return
        launched = self.pieces[self.launch_of[wait]].op
        launch = self.order.index(self.launch_of[wait])
        enough_us = self.graph.ops[self.pieces[wait].op.id].time_us
        gone_us = sum(self.pieces[i].time_us for i in self.order[launch + 1 : at])
        group, moving = [wait], {work.storage}
        held = moving | {self.graph.values[v].storage for v in launched.inputs}
        more_bytes = launched.workspace_bytes + self._freed_bytes(wait)
        end = at + 1
        while end < len(self.order):
            piece = self.pieces[self.order[end]]
            if piece.op.id in self.barriers:
                break
            if piece.touched & moving or piece.written & held or piece.freed & held:
                if not self._goes_along(piece, moving):
                    break
                group.append(self.order[end])
                moving |= {self.graph.values[v].storage for v in piece.op.outputs}
                more_bytes += self._freed_bytes(self.order[end])
            elif self.peaks[end] + more_bytes > self.budget_bytes or (
                gone_us >= enough_us and work.kind is not CollectiveKind.ALL_GATHER
            ):
                break
            else:
                gone_us += piece.time_us
            end += 1
        self._move_later(at, end, group, more_bytes)

    def _goes_along(self, piece: Piece, moving: set[int]) -> bool:
        """Whether a piece that touches what is waited for can be moved with the wait: a view of it, or a copy."""
        if piece.moves_data or not piece.freed <= moving or not self._reads(piece) <= moving:
            return False
        return piece.makes_nothing(self.graph) or (piece.op.target.startswith(_COPIES) and piece.run.into is None)

    def _reads(self, piece: Piece) -> set[int]:
        return {self.graph.values[v].storage for v in piece.op.inputs}

    def _freed_bytes(self, piece: int) -> int:
        return sum(self.graph.storages[s].nbytes for s in self.pieces[piece].freed)

    def _move_later(self, begin: int, end: int, group: list[int], more_bytes: int) -> None:
        stay = [i for i in self.order[begin:end] if i not in set(group)]
        if not stay:
            return
        peaks = dict(zip(self.order[begin:end], self.peaks[begin:end], strict=True))
        self.order[begin:end] = [*stay, *group]
        self.peaks[begin:end] = [peaks[i] + more_bytes for i in (*stay, *group)]

    # -- gathers earlier ----------------------------------------------------------------------------------------------

    def _hoist_all(self) -> None:
        """From the last to the first, each as late as it can be launched and still be done when it is waited for."""
        gathers = [
            i
            for i, piece in enumerate(self.pieces)
            if piece.launches and piece.op.collective and piece.op.collective.kind is CollectiveKind.ALL_GATHER
        ]
        times = (self.pieces[i].time_us for i in self.order)
        starts = dict(zip(self.order, accumulate(times, initial=0.0), strict=False))  # launches take next to nothing
        begin_us = float("inf")  # of the gather that follows on the lane
        places = {piece: place for place, piece in enumerate(self.order)}
        for launch in sorted(gathers, key=places.__getitem__, reverse=True):
            begin_us = self._hoist(launch, begin_us, starts)

    def _hoist(self, launch: int, next_begin_us: float, starts: dict[int, float]) -> float:
        """Move one launch; when its work has to begin, in the time of ops."""
        piece, wait = self.pieces[launch], self.wait_of.get(launch)
        work = piece.op.collective
        assert work is not None
        if wait is None:
            return next_begin_us
        begin_us = min(starts[wait], next_begin_us) - self.pieces[wait].op.time_us
        if piece.before or piece.freed or piece.moves_data:
            return begin_us
        at = self.order.index(launch)
        group = self._feeding(launch, at)
        more_bytes = self.graph.storages[work.storage].nbytes + piece.op.workspace_bytes + self._made_bytes(group)
        sources = {self.graph.values[v].storage for i in group for v in self.pieces[i].op.inputs}
        to = at
        while to > 0 and starts[self.order[to]] > begin_us:
            if not self._may_pass(self.order[to - 1], work.storage, sources, group):
                break
            if self.order[to - 1] not in group and self.peaks[to - 1] + more_bytes > self.budget_bytes:
                break
            to -= 1
        self._move_earlier(at, to, group, more_bytes)
        return begin_us

    def _feeding(self, launch: int, at: int) -> list[int]:
        """The launch, and before it the views that it reads, or what they are collected in."""
        group, wanted = [launch], set(self.pieces[launch].op.inputs)
        for position in range(at - 1, -1, -1):
            piece = self.pieces[self.order[position]]
            if not wanted & set(piece.op.outputs):
                if at - position > _FEEDING_REACH:
                    break
                continue
            if piece.freed or not (piece.makes_nothing(self.graph) or _collects(piece)):
                break
            group.insert(0, self.order[position])
            wanted = (wanted - set(piece.op.outputs)) | set(piece.op.inputs)
        return group

    def _made_bytes(self, group: list[int]) -> int:
        """What the pieces before a launch make for it."""
        made = {s for i in group[:-1] for s in self.graph.makes[self.pieces[i].op.id]}
        return sum(self.graph.storages[s].nbytes for s in made)

    def _may_pass(self, other: int, made: int, sources: set[int], group: list[int]) -> bool:
        if other in group:
            return True
        piece = self.pieces[other]
        if piece.op.id in self.barriers or piece.written & sources or made in piece.touched or made in piece.freed:
            return False
        outputs = set(piece.op.outputs)
        return not any(outputs & set(self.pieces[i].op.inputs) for i in group)

    def _move_earlier(self, at: int, to: int, group: list[int], more_bytes: int) -> None:
        stay = [i for i in self.order[to : at + 1] if i not in set(group)]
        if not stay:
            return
        peaks = dict(zip(self.order[to : at + 1], self.peaks[to : at + 1], strict=True))
        inside = [i for i in self.order[to : at + 1] if i in set(group)]
        self.order[to : at + 1] = [*inside, *stay]
        before = max((peaks[i] for i in stay[:1]), default=0)
        self.peaks[to : at + 1] = [before + more_bytes for _ in inside] + [peaks[i] + more_bytes for i in stay]


def _collects(piece: Piece) -> bool:
    """Whether a piece only puts what several tensors have side by side, for one collective."""
    return piece.op.target.startswith("aten.cat.") and not piece.written and not piece.before and not piece.after


_FEEDING_REACH = 64  # pieces: a view of a shard stands just before its gather
