"""Ranks that are not here: what one of them captures and holds, and how few of them would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from bench.fit.report import RanksRow
from planner.allocator import held
from planner.analysis import candidates
from planner.group_link import with_group_link
from planner.ir import CollectiveKind, Graph, Op, Phase, Role
from planner.overlap import overlapping, reordered
from planner.plan import Plan, recompute_once
from planner.schedule import Schedule
from planner.simulator import Timeline, simulate
from profiler.estimating.devices import Device
from profiler.tracing.ranks.imagined import Sharding, imagined_group, shared_out
from profiler.tracing.ranks.replicated import wrapper_bytes
from profiler.tracing.whole_step import TracedStep, capture, capture_without_memory
from profiler.workload import Workload

MOST_RANKS = 1024  # beyond which none is looked for

Make = Callable[[int], Workload]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many devices of one server, and how they share the work."""

    ranks: int
    sharding: Sharding

    def __str__(self) -> str:
        return f"{self.ranks} ranks of {self.sharding.value}"

    def of(self, ranks: int) -> Cluster:
        """The same way of sharing among another number of ranks."""
        return replace(self, ranks=ranks)

    @contextmanager
    def imagined(self) -> Iterator[Capturing]:
        """Inside, this process is one of the ranks, and captures what that one runs."""
        with imagined_group(self.ranks) as mesh:
            yield Capturing(self, mesh)


class Capturing:
    """One rank of a cluster, which captures steps; `wrapper_bytes` is what its model's wrapper holds beside them."""

    def __init__(self, cluster: Cluster, mesh: Any) -> None:
        self._cluster = cluster
        self._mesh = mesh
        self.wrapper_bytes = 0

    def captured(self, make: Make, batch: int, *, name: str, device: Device, fake: bool) -> TracedStep:
        """The step of this rank; CaptureError where the model cannot be shared out so."""

        def shared(size: int) -> Workload:
            workload = shared_out(make(size), self._cluster.sharding, self._mesh)
            self.wrapper_bytes = wrapper_bytes(workload.model)
            return workload

        if fake:
            return capture_without_memory(shared, batch, name=name, target=device.target)
        return capture(*shared(batch), name=name, target=device.target)


def less(device: Device, nbytes: int) -> Device:
    """The device with so many bytes less for a step: somebody holds them beside it."""
    return replace(device, reserved_bytes=device.reserved_bytes + round(nbytes / (1 - device.fragmentation_share)))


def gathers_again(graph: Graph) -> Plan:
    """What fully_shard does by itself: every whole parameter goes after its forward, and is gathered again."""
    gathered = {
        op.collective.storage
        for op in graph.ops
        if op.collective is not None and op.collective.kind is CollectiveKind.ALL_GATHER
    }
    return recompute_once(graph, gathered & set(candidates(graph)))


def overlapped(graph: Graph, schedule: Schedule, *, budget_bytes: int = 0) -> Schedule:
    """The schedule with communication beside ops, within the budget or, if that is more, its own peak."""
    if not graph.wait_of:
        return schedule
    most = max(budget_bytes, simulate(graph, schedule).peak_bytes)
    order = overlapping(graph, schedule, budget_bytes=most)
    return schedule if order is None else reordered(graph, schedule, order)


# -- how few ranks would do -------------------------------------------------------------------------------------------


def fewest(fits: Callable[[int], bool], *, asked: int, asked_fits: bool) -> int | None:
    """The smallest number of ranks that fits, if more of them never need more each; None where none was found."""
    if asked_fits and (asked == 1 or fits(1)):
        return 1
    low, high = (1, asked) if asked_fits else (asked, 2 * asked)
    while not asked_fits and high <= MOST_RANKS and not fits(high):
        low, high = high, 2 * high
    if high > MOST_RANKS:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def among(graph: Graph, ranks: int, device: Device) -> Graph:
    """A rank's graph as it would be with another number of ranks: its shards, and how long collectives take.

    Shards are taken to be as even as they were, so that a row more or less of one is not seen.
    """
    works = [op.collective for op in graph.ops if op.collective is not None]
    share = Fraction(works[0].ranks, ranks)
    parts = {s.id for s in graph.storages if s.role in (Role.PARAM, Role.OPT_STATE) and graph.maker[s.id] is None}
    parts |= {work.storage for work in works if work.kind is CollectiveKind.REDUCE_SCATTER}
    storages = tuple(replace(s, nbytes=math.ceil(s.nbytes * share)) if s.id in parts else s for s in graph.storages)
    ops = tuple(_among(op, ranks, float(share)) for op in graph.ops)
    found = replace(graph, ops=ops, storages=storages).validate()
    return found if device.group_link is None else with_group_link(found, device.group_link)


def _among(op: Op, ranks: int, share: float) -> Op:
    if op.collective is not None:
        return replace(op, collective=replace(op.collective, ranks=ranks))
    return replace(op, time_us=op.time_us * share) if op.phase is Phase.OPTIMIZER else op


def row_of(graph: Graph, ranks: int, schedules: Sequence[Schedule], device: Device) -> RanksRow:
    """What one of so many ranks needs: as it is (the first of the schedules), and by the fastest that fits."""
    plain, *planned = schedules
    needed = _needed(graph, plain, device)
    row = RanksRow(ranks=ranks, unplanned_bytes=needed, planned_bytes=None, overhead=None, fits=False)
    if needed <= device.usable_bytes:
        return replace(row, fits=True)
    for timeline, schedule in sorted(_judged(graph, planned, device), key=lambda found: found[0].time_us):
        if timeline.peak_bytes > device.usable_bytes:
            continue
        needed = _needed(graph, schedule, device)
        if needed <= device.usable_bytes:
            return replace(row, planned_bytes=needed, overhead=timeline.overhead, fits=True)
    return row


def _judged(graph: Graph, schedules: Sequence[Schedule], device: Device) -> Iterator[tuple[Timeline, Schedule]]:
    for schedule in schedules:
        if device.host_link is not None or not schedule.moves:
            linked = replace(schedule, link=device.host_link)
            yield simulate(graph, linked), linked


def _needed(graph: Graph, schedule: Schedule, device: Device) -> int:
    if device.allocator is None:
        return simulate(graph, schedule).peak_bytes
    return held(graph, schedule, allocator=device.allocator).reserved_bytes
