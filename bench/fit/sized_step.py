"""A step on one device at every batch size, and the schedules that were found for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.fit.report import Option
from planner.allocator import held
from planner.ir import Graph
from planner.scaling import Scaling
from planner.schedule import Schedule
from planner.simulator import simulate
from profiler.estimating.devices import Device
from profiler.estimating.roofline import OpCost, op_costs, with_costs
from profiler.tracing.whole_step import TracedStep

# Graphs of a large step take some ten megabytes each: this many are held, and others made again.
GRAPHS_HELD = 24
# No batch above this is looked for.
LARGEST_BATCH = 2**20

# Per op: its cost at the two sizes that were captured.
Costs = Sequence[tuple[OpCost | None, OpCost | None]]


class Cost(NamedTuple):
    """What a schedule costs at a batch."""

    peak_bytes: int
    time_us: float
    overhead: float
    moved_bytes: int
    communication_us: float
    hidden_us: float


class SizedStep:
    """A step's graphs on one device by batch size, and what a schedule costs at each."""

    def __init__(self, scaling: Scaling, costs: Costs, device: Device) -> None:
        self.device = device
        self._scaling = scaling
        self._costs = costs
        self._graphs: dict[int, Graph] = {}
        self._costs_of: dict[tuple[int, int], Cost] = {}
        self._options: dict[tuple[int, int], Option] = {}

    @staticmethod
    def of(steps: Sequence[TracedStep], batches: Sequence[int], device: Device) -> SizedStep:
        """A step captured at two batch sizes, the smaller first."""
        low, high = steps
        scaling = Scaling(low=low.graph, high=high.graph, low_batch=batches[0], high_batch=batches[1])
        return SizedStep(scaling, tuple(zip(op_costs(low), op_costs(high), strict=True)), device)

    def on(self, device: Device) -> SizedStep:
        """The same step on another device."""
        return SizedStep(self._scaling, self._costs, device)

    def graph(self, batch: int) -> Graph:
        """The step at `batch`, in blocks of the device's allocator."""
        if batch not in self._graphs:
            if len(self._graphs) == GRAPHS_HELD:
                del self._graphs[next(iter(self._graphs))]
            share = float(self._scaling.share(batch))
            costs = [None if a is None or b is None else a.towards(b, share) for a, b in self._costs]
            self._graphs[batch] = with_costs(self._scaling.at(batch), costs, self.device)
        return self._graphs[batch]

    def cost(self, batch: int, schedule: Schedule) -> Cost:
        """What `schedule` costs at `batch`, whoever hands out the memory."""
        key = (batch, id(schedule))
        if key not in self._costs_of:
            found = simulate(self.graph(batch), replace(schedule, link=self.device.host_link))
            self._costs_of[key] = Cost(
                found.peak_bytes,
                found.time_us,
                found.overhead,
                found.moved_bytes,
                found.communication_us,
                found.hidden_us,
            )
        return self._costs_of[key]

    def option(self, batch: int, schedule: Schedule) -> Option:
        """The same, with what the device's allocator holds for it."""
        key = (batch, id(schedule))
        if key not in self._options:
            cost, allocator = self.cost(batch, schedule), self.device.allocator
            needed = cost.peak_bytes
            if allocator is not None:
                needed = held(self.graph(batch), schedule, allocator=allocator).reserved_bytes
            self._options[key] = Option(
                batch=batch,
                peak_bytes=cost.peak_bytes,
                needed_bytes=needed,
                step_us=cost.time_us,
                overhead=cost.overhead,
                moved_bytes=cost.moved_bytes,
                communication_us=cost.communication_us,
                hidden_us=cost.hidden_us,
            )
        return self._options[key]

    def fits(self, batch: int, schedule: Schedule, budget_bytes: int) -> bool:
        """Whether the device's allocator holds it in so many bytes; not asked where more than that lives at once."""
        if self.device.host_link is None and schedule.moves:
            return False
        if self.cost(batch, schedule).peak_bytes > budget_bytes:
            return False
        return self.option(batch, schedule).needed_bytes <= budget_bytes


class Book:
    """Schedules that were found, to be tried at every batch and on every device."""

    def __init__(self, unplanned: Schedule) -> None:
        self.unplanned = unplanned
        self.schedules = [unplanned]

    def add(self, schedules: Iterable[Schedule | None]) -> None:
        self.schedules += [s for s in schedules if s is not None and s not in self.schedules]

    def best(self, step: SizedStep, batch: int, budget_bytes: int) -> Option | None:
        """The fastest that fits the budget, of those known."""
        fastest = sorted(self.schedules, key=lambda schedule: step.cost(batch, schedule).time_us)
        found = next((s for s in fastest if step.fits(batch, s, budget_bytes)), None)
        return None if found is None else step.option(batch, found)


def largest(fits: Callable[[int], bool], *, known: int = 0) -> int:
    """The largest batch that fits, 0 for none; if one fits, every smaller one must. That `known` fits is not asked."""
    low, high = known, known + 1
    while fits(high):
        low, high = high, 2 * high - known
        if low >= LARGEST_BATCH:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
