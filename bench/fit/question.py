"""Will it fit? A step captured without memory, planned for a device that need not be here.

`fit(make, device="A100-40", batch=32)` captures the step at three batch sizes, of tensors without memory. The graphs
at all other sizes follow from two of them; the third one checks it. Every time is the estimate of
`profiler.estimating.roofline`, every peak that of the simulator, in the device's allocator blocks and with its
allowances for workspaces; what has to fit is what that allocator holds, by simulation.

Plans are made at one batch size, over a range of budgets. A schedule names ops and storages, never sizes, so each of
them is simulated exactly at every other size: that is how the largest batch is searched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property

import strategies
from bench.fit.cluster import Capturing, Cluster, among, fewest, gathers_again, less, overlapped, row_of
from bench.fit.report import ClusterReport, FitReport, GpuRow, Largest, Option, RanksRow, Scaled
from bench.fit.sized_step import Book, SizedStep, largest
from planner.analysis import Floor, floor
from planner.errors import PlannerError
from planner.ir import Graph
from planner.scaling import Scaling
from planner.schedule import Schedule, lower, unplanned_schedule
from planner.simulator import simulate
from planner.solve import Problem, Solution, Status, solve
from profiler.errors import CaptureError
from profiler.estimating.devices import DEVICES, Device, find_device
from profiler.tracing.ranks.imagined import Sharding
from profiler.tracing.whole_step import TracedStep, capture, capture_without_memory
from profiler.workload import Workload
from strategies.frontier import trade_off_curve

# How much longer than the unplanned step a planned one may take.
LIMITS = (0.05, 0.10, 0.30)
# Shares of what the step adds to memory at which plans are made.
BUDGETS = tuple(f"{percent}%" for percent in (85, 70, 55, 40, 25, 10))
# More plans for each limit, at batches between the largest found and the next limit's.
REFINEMENTS = 3
# The same for one of several ranks, whose step takes longer to capture: everything together is a minute or two.
BUDGETS_OF_RANKS = ("70%", "40%", "15%")
REFINEMENTS_OF_RANKS = 1
WORTH_TRYING = 0.02  # of a batch: less than this is not searched for

Tell = Callable[[str], None]


class FitError(PlannerError):
    """A question that cannot be answered, and why."""


def fit(
    make: Callable[[int], Workload],
    device: str | Device = "A100-40",
    *,
    batch: int = 8,
    name: str = "",
    time_limit_s: float = 5.0,
    without_memory: bool = True,
    cluster: Cluster | None = None,
    tell: Tell = lambda text: None,
) -> FitReport:
    """Whether `make(batch)` trains on `device`, and at what cost; the largest batches, and the smallest device.

    `time_limit_s` is for each plan. `without_memory=False` makes real tensors, for a `make` that needs their values.
    With a `cluster`, `batch` is that of each rank, every figure is one rank's, and the smallest number of ranks is
    looked for instead of the smallest device.
    """
    target = find_device(device) if isinstance(device, str) else device
    if cluster is not None and target.group_link is None:
        raise FitError(f"{target.name} says no group_link_gb_per_s: how fast its ranks communicate is not known")
    asked = _Question(
        make, target, batch, name=name, time_limit_s=time_limit_s, fake=without_memory, cluster=cluster, tell=tell
    )
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
        cluster: Cluster | None,
        tell: Tell,
    ) -> None:
        self.make = make
        self.device = device
        self.batch = batch
        self.name = name
        self.time_limit_s = time_limit_s
        self.fake = fake
        self.cluster = cluster
        self.wrapper_bytes = 0
        self.tell = tell
        self.found: dict[float, int] = {}  # the largest batch so far within each limit on the extra time

    def answer(self) -> FitReport:
        started = time.perf_counter()
        self._capture()
        captured = time.perf_counter()
        step, budget = self.step, self.device.usable_bytes
        asked = simulate(step.graph(self.batch), self.book.unplanned)
        asked_floor = _floor(step, self.batch)
        solution = self._plan_asked()
        answered = time.perf_counter()
        self.largest_possible = largest(lambda b: not self._cannot_fit(step, b))
        self._fill_book()
        by_limit = self._largest()
        gpus = self._gpus() if self.cluster is None else ()
        fits = step.fits(self.batch, self.book.unplanned, budget)
        planned = None if fits else self.book.best(step, self.batch, budget)
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
            plan_s=answered - captured,
            cluster=None if self.cluster is None else self._of_cluster(self.cluster, fits=fits, planned=planned),
            search_s=time.perf_counter() - answered,
        )

    # -- capture ----------------------------------------------------------------------------------------------------

    def _capture(self) -> None:
        """The step at the asked batch and twice that, and a third time to check what follows from both."""
        low = max(2, self.batch)  # a batch of 1 has views where others have copies
        sizes = (low, 2 * low)
        with nullcontext() if self.cluster is None else self.cluster.imagined() as rank:
            self._capture_sizes(rank, sizes)
        self.step = SizedStep.of(self.captures, sizes, self.device)
        graph = self.step.graph(sizes[0])
        self.book = Book(overlapped(graph, unplanned_schedule(graph)))
        if self.cluster is not None and self.cluster.sharding is Sharding.FSDP2:
            self.regathering = overlapped(graph, lower(graph, gathers_again(graph)))
            self.book.add([self.regathering])

    def _capture_sizes(self, rank: Capturing | None, sizes: tuple[int, int]) -> None:
        self.captures = tuple(self._captured(size, rank) for size in sizes)
        self.name = self.name or self.captures[0].graph.name
        plain = Scaling(
            low=self.captures[0].graph, high=self.captures[1].graph, low_batch=sizes[0], high_batch=sizes[1]
        )
        if rank is None:
            self.scaled = self._checked(plain, 3 * sizes[0])
        else:  # whose step takes twice as long to capture
            self.scaled = Scaled(captured=sizes, checked=None, deviation="of a rank two sizes are captured")
        if rank is not None:
            self.wrapper_bytes = rank.wrapper_bytes
            self.device = less(self.device, self.wrapper_bytes)

    def _checked(self, plain: Scaling, batch: int) -> Scaled:
        """What a third capture says; a step that wants other sizes than this one is not refused for it."""
        sizes = (plain.low_batch, plain.high_batch)
        try:
            third = self._captured(batch, None)
        except FitError as error:
            return Scaled(captured=sizes, checked=None, deviation=str(error))
        return Scaled(captured=sizes, checked=batch, deviation=plain.deviation(third.graph, batch))

    def _captured(self, batch: int, rank: Capturing | None) -> TracedStep:
        self.tell(f"capturing at batch {batch}")
        target = self.device.target
        try:
            if rank is not None:
                return rank.captured(self.make, batch, name=self.name, device=self.device, fake=self.fake)
            if self.fake:
                return capture_without_memory(self.make, batch, name=self.name, target=target)
            return capture(*self.make(batch), name=self.name, target=target)
        except CaptureError as error:
            raise FitError(f"batch {batch}: {error}") from error

    # -- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, step: SizedStep, batch: int, *, time_limit_s: float) -> Solution:
        device = step.device
        problem = Problem(
            graph=step.graph(batch),
            budget_bytes=device.usable_bytes,
            time_limit_s=time_limit_s,
            allocator=device.allocator,
            most_reserved_bytes=None if device.allocator is None else device.usable_bytes,
            host_link=device.host_link,
        )
        found = solve(problem, strategies.make(f"auto:seconds={time_limit_s}"))
        self._note(step.graph(batch), [found.schedule], budget_bytes=device.usable_bytes)
        return found

    def _note(self, graph: Graph, schedules: Iterable[Schedule | None], *, budget_bytes: int) -> None:
        """Schedules for the book, and each with its communication beside ops where that fits."""
        known = [schedule for schedule in schedules if schedule is not None]
        self.book.add(known)
        if graph.wait_of:
            self.book.add(overlapped(graph, schedule, budget_bytes=budget_bytes) for schedule in known)

    def _plan_asked(self) -> Solution | None:
        """The asked batch gets more time than the others, and a proven gap."""
        if self._fits(self.batch, self.book.unplanned) or self._cannot_fit(self.step, self.batch):
            return None
        self.tell(f"planning batch {self.batch} for {self.device.name}")
        return self._plan(self.step, self.batch, time_limit_s=3 * self.time_limit_s)

    def _fill_book(self) -> None:
        """Plans over a range of budgets, at a batch that needs them."""
        unplanned = self.found[0.0] = largest(lambda b: self._fits(b, self.book.unplanned))
        reference = max(self.batch, 2 * unplanned)
        graph = self.step.graph(reference)
        budgets = BUDGETS if self.cluster is None else BUDGETS_OF_RANKS
        self.tell(f"planning batch {reference} at {len(budgets)} budgets")
        points = trade_off_curve(graph, budgets, time_limit_s=self.time_limit_s)
        planned = [lower(graph, point.plan) for point in points if point.plan is not None]
        self._note(graph, planned, budget_bytes=self.device.usable_bytes)

    def _fits(self, batch: int, schedule: Schedule) -> bool:
        return self.step.fits(batch, schedule, self.device.usable_bytes)

    def _cannot_fit(self, step: SizedStep, batch: int) -> bool:
        return _floor(step, batch).nbytes > step.device.usable_bytes

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
        for _ in range(REFINEMENTS if self.cluster is None else REFINEMENTS_OF_RANKS):
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
        budget, most = self.device.usable_bytes, math.inf if limit is None else limit
        book = Book(self.book.unplanned) if limit == 0 else self.book

        def within(batch: int) -> Option | None:
            found = book.best(self.step, batch, budget) if batch <= self.largest_possible else None
            return found if found is not None and found.overhead <= most else None

        # More plans never make it smaller: what was found within this limit, or a lower one, is where to go on.
        known = max(batch for other, batch in self.found.items() if other <= most)
        batch = self.found[most] = largest(lambda b: within(b) is not None, known=known)
        return Largest(limit=limit, found=within(batch) if batch else None)

    def _gpus(self) -> tuple[GpuRow, ...]:
        """The asked batch on every known device, the smallest first; none where the CPU's kernels were captured."""
        if self.device.target is None:
            return ()
        rows = []
        for device in DEVICES.values():
            if device.has_bfloat16 == self.device.has_bfloat16 or not self._half_precision:
                self.tell(f"planning batch {self.batch} for {device.name}")
                rows.append(self._gpu_row(device))
        return tuple(rows)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def _of_cluster(self, cluster: Cluster, *, fits: bool, planned: Option | None) -> ClusterReport:
        plain = self.step.option(self.batch, self.book.unplanned)
        asked = RanksRow(
            ranks=cluster.ranks,
            unplanned_bytes=plain.needed_bytes,
            planned_bytes=None if planned is None else planned.needed_bytes,
            overhead=None if planned is None else planned.overhead,
            fits=fits or planned is not None,
        )
        rows = {cluster.ranks: asked}
        sharded = cluster.sharding is Sharding.FSDP2
        return ClusterReport(
            ranks=cluster.ranks,
            sharding=cluster.sharding.value,
            link=str(self.device.group_link),
            wrapper_bytes=self.wrapper_bytes,
            gathers_again=self.step.option(self.batch, self.regathering) if sharded else None,
            fewest=self._fewest(cluster, rows) if sharded else 1 if asked.fits else None,
            by_ranks=tuple(rows[ranks] for ranks in sorted(rows)),
        )

    def _fewest(self, cluster: Cluster, rows: dict[int, RanksRow]) -> int | None:
        """The smallest number of ranks; each one tried is noted in `rows`."""
        graph = self.step.graph(self.batch)

        def fits(ranks: int) -> bool:
            other = among(graph, ranks, self.device)
            rows[ranks] = row_of(other, ranks, self.book.schedules, self.device)
            return rows[ranks].fits

        self.tell(f"other numbers of ranks at batch {self.batch}")
        return fewest(fits, asked=cluster.ranks, asked_fits=rows[cluster.ranks].fits)

    @cached_property
    def _half_precision(self) -> bool:
        """Whether the kernels chosen depend on what the device can do with half precision."""
        return any(v.dtype in ("bfloat16", "float16") for v in self.captures[0].graph.values)

    def _gpu_row(self, device: Device) -> GpuRow:
        sized = self.step.on(device)
        plain = sized.option(self.batch, self.book.unplanned)
        fits = plain.needed_bytes <= device.usable_bytes
        impossible = self._cannot_fit(sized, self.batch)
        if not fits and not impossible and device.name != self.device.name:
            self._plan(sized, self.batch, time_limit_s=self.time_limit_s)
        return GpuRow(
            device=device.name,
            usable_bytes=device.usable_bytes,
            unplanned_bytes=plain.needed_bytes,
            unplanned=plain if fits else None,
            planned=None if fits or impossible else self.book.best(sized, self.batch, device.usable_bytes),
            floor_bytes=_floor(sized, self.batch).nbytes,
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


def _floor(step: SizedStep, batch: int) -> Floor:
    """What any plan needs there, with what the device's link to the host allows."""
    return floor(step.graph(batch), moving=step.device.host_link is not None)


def _gap(solution: Solution | None, planned: Option | None) -> float | None:
    """The proven gap of the asked batch's plan, if that is the plan that is reported."""
    if solution is None or planned is None or solution.plan is None or solution.status is not Status.FITS:
        return None
    bound = solution.plan.lower_bound_us
    recompute_us = planned.step_us * planned.overhead / (1 + planned.overhead)
    return None if bound is None or recompute_us <= 0 else max(0.0, (recompute_us - bound) / recompute_us)
