"""Will it fit? A step captured without memory, planned for a device that need not be here.

`fit(make, device="A100-40", batch=32)` captures the step at three batch sizes, of tensors without memory. The graphs
at all other sizes follow from two of them; the third one checks it. Every time is the estimate of
`profiler.estimating.roofline`, every peak that of the simulator, in the device's allocator blocks and with its
allowances for workspaces.

Plans are made at one batch size, over a range of budgets. A schedule names ops and storages, never sizes, so each of
them is simulated exactly at every other size: that is how the largest batch is searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import strategies
from planner.analysis import floor
from planner.errors import PlannerError
from planner.ir import Graph
from planner.scaling import Scaling
from planner.schedule import Schedule, lower, unplanned_schedule
from planner.simulator import Timeline, simulate
from planner.solve import Problem, Solution, Status, solve
from planner.units import human_bytes
from profiler.errors import CaptureError
from profiler.estimating.devices import DEVICES, Device, find_device
from profiler.estimating.roofline import OpCost, op_costs, with_costs
from profiler.tracing.gpu_kernels import Substitution, Target
from profiler.tracing.whole_step import TracedStep, capture, capture_without_memory
from profiler.workload import Workload
from strategies.frontier import pareto

# How much longer than the unplanned step a planned one may take.
LIMITS = (0.05, 0.10, 0.30)
# Shares of what the step adds to memory at which plans are made.
BUDGETS = tuple(f"{percent}%" for percent in (85, 70, 55, 40, 25, 10))
# More plans for each limit, at batches between the largest found and the next limit's.
REFINEMENTS = 3
WORTH_TRYING = 0.02  # of a batch: less than this is not searched for
# Graphs of a large step take some ten megabytes each: this many are held, and others made again.
GRAPHS_HELD = 12
# No batch above this is looked for.
LARGEST_BATCH = 2**20

Tell = Callable[[str], None]


class FitError(PlannerError):
    """A question that cannot be answered, and why."""


# -- what comes out ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run one batch on one device: estimated peak, time and extra time. 0 extra: without a plan."""

    batch: int
    peak_bytes: int
    step_us: float
    overhead: float

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_us * 1e6 if self.step_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest batch found within a limit on the extra time; None: no batch at all."""

    limit: float | None  # None: at any cost
    found: Option | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """The asked batch on one of the known devices. `planned` is None where nothing was found, or nothing can be."""

    device: str
    usable_bytes: int
    unplanned_peak_bytes: int
    unplanned: Option | None
    planned: Option | None
    floor_bytes: int

    @property
    def answer(self) -> str:
        if self.unplanned is not None:
            return "fits as it is"
        if self.planned is not None:
            return f"fits with a plan, {self.planned.overhead:.1%} more time"
        return "cannot fit" if self.floor_bytes > self.usable_bytes else "no plan found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Where the figures of other batch sizes come from."""

    captured: tuple[int, int]
    checked: int | None  # None: the step cannot be captured at a third size
    deviation: str  # "" where the bytes at the checked size are those predicted

    def __str__(self) -> str:
        low, high = self.captured
        how = (
            f"captured at batch {low} and {high}; at other sizes tensors, arithmetic and traffic of each op lie on the "
            "line through both, and its time and workspace are estimated from these"
        )
        if self.checked is None:
            return f"{how}. NOT checked at a third size: {self.deviation}"
        if self.deviation:
            return f"{how}. Tensors are NOT exact: {self.deviation}"
        return f"{how}. Tensors are exact, as a capture at batch {self.checked} shows"


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Everything that was found out. All of it is estimated for `device`; nothing was measured on it."""

    name: str
    device: str
    usable_bytes: int
    batch: int
    ops: int
    unplanned: Option
    by_role: tuple[tuple[str, int], ...]
    start_bytes: int
    floor_bytes: int
    floor: str
    planned: Option | None
    gap: float | None
    largest: tuple[Largest, ...]
    largest_possible: int  # no plan can train more: their floor is above the memory
    gpus: tuple[GpuRow, ...]
    batches: tuple[Option, ...]  # the best option of each batch that fits
    budgets_bytes: tuple[tuple[str, int], ...]
    overheads: tuple[tuple[int, tuple[float | None, ...]], ...]  # per batch, one for each of `budgets_bytes`
    scaled: Scaled
    substitutions: tuple[Substitution, ...]
    unknown: tuple[str, ...]
    capture_s: float
    plan_s: float

    @property
    def fits(self) -> bool:
        """Whether the batch fits as it is."""
        return self.unplanned.peak_bytes <= self.usable_bytes

    @cached_property
    def fastest(self) -> Option | None:
        """The batch with the most samples a second, recomputation included."""
        return max(self.batches, key=lambda o: (o.samples_per_s, -o.batch), default=None)

    @property
    def verdict(self) -> str:
        """One sentence."""
        need, have = human_bytes(self.unplanned.peak_bytes), human_bytes(self.usable_bytes)
        where = f"{self.name} on {self.device} (estimated): it needs {need}, and there are {have} for tensors"
        if self.fits:
            return f"Yes: {where}."
        if self.planned is not None:
            peak, more = human_bytes(self.planned.peak_bytes), f"{self.planned.overhead:.1%}"
            near = "" if self.gap is None else f" (within {self.gap:.1%} of the optimum)"
            return f"Yes, with a plan: {where}; planned it needs {peak} and {more} more time{near}."
        if self.floor_bytes > self.usable_bytes:
            return f"No: {where}; under any plan it needs at least {human_bytes(self.floor_bytes)}."
        return f"Not found: {where}; no plan was found that fits, and none is ruled out."

    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        changes = [{**asdict(s), "change": s.change.value} for s in self.substitutions]
        return {**asdict(self), "substitutions": changes, "verdict": self.verdict, "fits": self.fits}


# -- the step on one device, at every batch ----------------------------------------------------------------------------


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
            low, high = self._scaling.low_batch, self._scaling.high_batch
            share = (batch - low) / (high - low)
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


# -- the question ------------------------------------------------------------------------------------------------------


def fit(
    make: Callable[[int], Workload],
    device: str | Device = "A100-40",
    *,
    batch: int = 8,
    name: str = "",
    time_limit_s: float = 5.0,
    without_memory: bool = True,
    tell: Tell = lambda text: None,
) -> FitReport:
    """Whether `make(batch)` trains on `device`, and at what cost; the largest batches, and the smallest device.

    `time_limit_s` is for each plan. `without_memory=False` makes real tensors, for a `make` that needs their values.
    """
    target = find_device(device) if isinstance(device, str) else device
    asked = _Question(make, target, batch, name=name, time_limit_s=time_limit_s, fake=without_memory, tell=tell)
    return asked.answer()


class _Question:
    """One question on its way to its report."""

    def __init__(
        self,
        make: Callable[[int], Workload],
        device: Device,
        batch: int,
        *,
        name: str,
        time_limit_s: float,
        fake: bool,
        tell: Tell,
    ) -> None:
        self.make = make
        self.device = device
        self.batch = batch
        self.name = name
        self.time_limit_s = time_limit_s
        self.fake = fake
        self.tell = tell

    def answer(self) -> FitReport:
        started = time.perf_counter()
        self._capture()
        captured = time.perf_counter()
        step, budget = self.step, self.device.usable_bytes
        asked = simulate(step.graph(self.batch), self.book.unplanned)
        asked_floor = floor(step.graph(self.batch))
        solution = self._plan_asked(asked)
        self.largest_possible = largest(lambda b: not self._cannot_fit(step, b))
        self._fill_book()
        by_limit = self._largest()
        gpus = self._gpus()
        planned = None if asked.peak_bytes <= budget else self.book.best(step, self.batch, budget)
        batches = self._interesting(by_limit)
        budgets = self._budgets()
        return FitReport(
            name=f"{self.name} at batch {self.batch}",
            device=self.device.name,
            usable_bytes=budget,
            batch=self.batch,
            ops=len(step.graph(self.batch).ops),
            unplanned=step.option(self.batch, self.book.unplanned),
            by_role=tuple((role.value, nbytes) for role, nbytes in asked.peak_by_role),
            start_bytes=asked.start_bytes,
            floor_bytes=asked_floor.nbytes,
            floor=str(asked_floor),
            planned=planned,
            gap=_gap(solution, planned),
            largest=by_limit,
            largest_possible=self.largest_possible,
            gpus=gpus,
            batches=tuple(o for b in batches if (o := self.book.best(step, b, budget)) is not None),
            budgets_bytes=budgets,
            overheads=tuple((b, tuple(self._overhead(b, size) for _, size in budgets)) for b in batches),
            scaled=self.scaled,
            substitutions=self.captures[0].substitutions,
            unknown=self.captures[0].unknown,
            capture_s=captured - started,
            plan_s=time.perf_counter() - captured,
        )

    # -- capture ----------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """The step at the asked batch and twice that, and a third time to check what follows from both."""
        low = max(2, self.batch)  # a batch of 1 has views where others have copies
        sizes = (low, 2 * low)
        self.captures = tuple(self._captured(size) for size in sizes)
        self.name = self.name or self.captures[0].graph.name
        plain = Scaling(
            low=self.captures[0].graph, high=self.captures[1].graph, low_batch=sizes[0], high_batch=sizes[1]
        )
        self.scaled = self._checked(plain, 3 * low)
        self.step = SizedStep.of(self.captures, sizes, self.device)
        self.book = Book(unplanned_schedule(self.captures[0].graph))

    def _checked(self, plain: Scaling, batch: int) -> Scaled:
        """What a third capture says; a step that wants other sizes than this one is not refused for it."""
        sizes = (plain.low_batch, plain.high_batch)
        try:
            third = self._captured(batch)
        except FitError as error:
            return Scaled(captured=sizes, checked=None, deviation=str(error))
        return Scaled(captured=sizes, checked=batch, deviation=plain.deviation(third.graph, batch))

    def _captured(self, batch: int) -> TracedStep:
        self.tell(f"capturing at batch {batch}")
        target = target_for(self.device)
        try:
            if self.fake:
                return capture_without_memory(self.make, batch, name=self.name, target=target)
            return capture(*self.make(batch), name=self.name, target=target)
        except CaptureError as error:
            raise FitError(f"batch {batch}: {error}") from error

    # -- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, step: SizedStep, batch: int, *, time_limit_s: float) -> Solution:
        problem = Problem(graph=step.graph(batch), budget_bytes=step.device.usable_bytes, time_limit_s=time_limit_s)
        found = solve(problem, strategies.make(f"auto:seconds={time_limit_s}"))
        self.book.add([found.schedule])
        return found

    def _plan_asked(self, asked: Timeline) -> Solution | None:
        """The asked batch gets more time than the others, and a proven gap."""
        if asked.peak_bytes <= self.device.usable_bytes or self._cannot_fit(self.step, self.batch):
            return None
        self.tell(f"planning batch {self.batch} for {self.device.name}")
        return self._plan(self.step, self.batch, time_limit_s=3 * self.time_limit_s)

    def _fill_book(self) -> None:
        """Plans over a range of budgets, at a batch that needs them."""
        unplanned = largest(lambda b: self._fits(b, self.book.unplanned))
        reference = max(self.batch, 2 * unplanned)
        graph = self.step.graph(reference)
        self.tell(f"planning batch {reference} at {len(BUDGETS)} budgets")
        points = pareto(graph, BUDGETS, time_limit_s=self.time_limit_s)
        self.book.add(lower(graph, point.plan) for point in points if point.plan is not None)

    def _fits(self, batch: int, schedule: Schedule) -> bool:
        return self.step.option(batch, schedule).peak_bytes <= self.device.usable_bytes

    def _cannot_fit(self, step: SizedStep, batch: int) -> bool:
        return floor(step.graph(batch)).nbytes > step.device.usable_bytes

    # -- answers ----------------------------------------------------------------------------------------------------

    def _largest(self) -> tuple[Largest, ...]:
        """For each limit on the extra time, from none at all to any."""
        limits = (0.0, *LIMITS, None)
        for position in range(len(limits) - 1, 0, -1):
            self._refine(limits[position], self._ceiling(limits[position + 1 :]))
        return tuple(self._largest_within(limit) for limit in limits)

    def _ceiling(self, dearer: Sequence[float | None]) -> int:
        """A batch that need not be tried: more than what dearer limits allow, or than any plan can."""
        found = self._largest_within(dearer[0]).found if dearer else None
        return self.largest_possible + 1 if found is None else found.batch + 1

    def _refine(self, limit: float | None, ceiling: int) -> None:
        """Plans for batches above the largest found, closing in on the largest there is."""
        for _ in range(REFINEMENTS):
            found = self._largest_within(limit).found
            low = 0 if found is None else found.batch
            middle = (low + ceiling) // 2
            if middle <= low or middle - low < low * WORTH_TRYING:
                return
            self.tell(f"planning batch {middle} for {self.device.name}")
            self._plan(self.step, middle, time_limit_s=self.time_limit_s)
            if self._largest_within(limit).found in (None, found):
                ceiling = middle

    def _largest_within(self, limit: float | None) -> Largest:
        budget = self.device.usable_bytes
        book = Book(self.book.unplanned) if limit == 0 else self.book

        def within(batch: int) -> Option | None:
            found = book.best(self.step, batch, budget)
            return found if found is not None and (limit is None or found.overhead <= limit) else None

        batch = largest(lambda b: within(b) is not None)
        return Largest(limit=limit, found=within(batch) if batch else None)

    def _gpus(self) -> tuple[GpuRow, ...]:
        """The asked batch on every known device, the smallest first; none where the CPU's kernels were captured."""
        if target_for(self.device) is None:
            return ()
        rows = []
        for device in DEVICES.values():
            if _has_bfloat16(device) == _has_bfloat16(self.device) or not self._half_precision:
                self.tell(f"planning batch {self.batch} for {device.name}")
                rows.append(self._gpu_row(device))
        return tuple(rows)

    @cached_property
    def _half_precision(self) -> bool:
        """Whether the kernels chosen depend on what the device can do with half precision."""
        return any(v.dtype in ("bfloat16", "float16") for v in self.captures[0].graph.values)

    def _gpu_row(self, device: Device) -> GpuRow:
        sized = self.step.on(device)
        plain = sized.option(self.batch, self.book.unplanned)
        fits = plain.peak_bytes <= device.usable_bytes
        impossible = self._cannot_fit(sized, self.batch)
        if not fits and not impossible and device.name != self.device.name:
            self._plan(sized, self.batch, time_limit_s=self.time_limit_s)
        return GpuRow(
            device=device.name,
            usable_bytes=device.usable_bytes,
            unplanned_peak_bytes=plain.peak_bytes,
            unplanned=plain if fits else None,
            planned=None if fits or impossible else self.book.best(sized, self.batch, device.usable_bytes),
            floor_bytes=floor(sized.graph(self.batch)).nbytes,
        )

    def _interesting(self, by_limit: Iterable[Largest]) -> tuple[int, ...]:
        """Batches for the tables: the asked one, the largest ones, and powers of two up to them."""
        found = {row.found.batch for row in by_limit if row.found is not None}
        most = max(found, default=0)
        powers = [2**i for i in range(most.bit_length())]
        return tuple(sorted({*powers[-6:], *found, self.batch}))

    def _budgets(self) -> tuple[tuple[str, int], ...]:
        """Memory sizes for the table: what the known devices have for tensors, each once."""
        names: dict[int, str] = {}
        for device in (self.device, *DEVICES.values()):
            names.setdefault(device.usable_bytes, device.name)
        return tuple((names[size], size) for size in sorted(names))

    def _overhead(self, batch: int, budget_bytes: int) -> float | None:
        found = self.book.best(self.step, batch, budget_bytes)
        return None if found is None else found.overhead


def _gap(solution: Solution | None, planned: Option | None) -> float | None:
    """The proven gap of the asked batch's plan, if that is the plan that is reported."""
    if solution is None or planned is None or solution.plan is None or solution.status is not Status.FITS:
        return None
    bound = solution.plan.lower_bound_us
    recompute_us = planned.step_us * planned.overhead / (1 + planned.overhead)
    return None if bound is None or recompute_us <= 0 else max(0.0, (recompute_us - bound) / recompute_us)


def target_for(device: Device) -> Target | None:
    """Whose kernels to capture; None for the CPU at hand, which gets its memory page by page and runs its own."""
    return Target(name=device.name, has_bfloat16=_has_bfloat16(device)) if math.isinf(device.new_bytes_per_s) else None


def _has_bfloat16(device: Device) -> bool:
    return "bfloat16" in device.flops_by_dtype
