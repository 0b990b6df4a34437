"""A step on one device at every batch size, and the schedules that were found for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bench.fit.report import Option
from planner.ir import Graph
from planner.scaling import Scaling
from planner.schedule import Schedule
from planner.simulator import simulate
from profiler.estimating.devices import Device
from profiler.estimating.roofline import OpCost, op_costs, with_costs
from profiler.tracing.whole_step import TracedStep

# Graphs of a large step take some ten megabytes each: this many are held, and others made again.
GRAPHS_HELD = 12
# No batch above this is looked for.
LARGEST_BATCH = 2**20

# Per op: its cost at the two sizes that were captured.
Costs = Sequence[tuple[OpCost | None, OpCost | None]]


class SizedStep:
    """A step's graphs on one device by batch size, and what a schedule costs at each."""

    def __init__(self, scaling: Scaling, costs: Costs, device: Device) -> None:
        self.device = device
        self._scaling = scaling
        self._costs = costs
        self._graphs: dict[int, Graph] = {}
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

    def option(self, batch: int, schedule: Schedule) -> Option:
        """What `schedule` costs at `batch`."""
        key = (batch, id(schedule))
        if key not in self._options:
            found = simulate(self.graph(batch), schedule)
            self._options[key] = Option(
                batch=batch, peak_bytes=found.peak_bytes, step_us=found.time_us, overhead=found.overhead
            )
        return self._options[key]


class Book:
    """Schedules that were found, to be tried at every batch and on every device."""

    def __init__(self, unplanned: Schedule) -> None:
        self.unplanned = unplanned
        self.schedules = [unplanned]

    def add(self, schedules: Iterable[Schedule | None]) -> None:
        self.schedules += [s for s in schedules if s is not None and s not in self.schedules]

    def best(self, step: SizedStep, batch: int, budget_bytes: int) -> Option | None:
        """The fastest that fits the budget, of those known."""
        options = (step.option(batch, schedule) for schedule in self.schedules)
        return min((o for o in options if o.peak_bytes <= budget_bytes), key=lambda o: o.step_us, default=None)


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits, 0 for none; if one fits, every smaller one must."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if low >= LARGEST_BATCH:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
