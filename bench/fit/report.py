"""What `fit` finds out, as one record. All of it is estimated; nothing was measured on the device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from planner.units import human_bytes
from profiler.tracing.fx_graphs.gpu_kernels import Substitution


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run one batch on one device: estimated peak, time and extra time. 0 extra: without a plan.

    `needed_bytes` is what the device's allocator holds for that peak, by simulation.
    """

    batch: int
    peak_bytes: int
    needed_bytes: int
    step_us: float
    overhead: float
    moved_bytes: int = 0  # to the host and back, in every step
    communication_us: float = 0.0  # of all collectives of the step
    hidden_us: float = 0.0  # of that, while ops run

    @property
    def hidden_share(self) -> float | None:
        """How much of the communication costs nothing; None where there is none."""
        return self.hidden_us / self.communication_us if self.communication_us else None

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
    unplanned_bytes: int  # what the device's allocator would hold
    unplanned: Option | None
    planned: Option | None
    floor_bytes: int

    @property
    def answer(self) -> str:
        if self.unplanned is not None:
            return "fits as it is"
        if self.planned is not None:
            moved = self.planned.moved_bytes
            moves = f" that moves {human_bytes(moved)} a step" if moved else ""
            return f"fits with a plan{moves}, {self.planned.overhead:.1%} more time"
        return "cannot fit" if self.floor_bytes > self.usable_bytes else "no plan found"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRow:
    """The asked batch on each of so many ranks, and what one needs; `overhead` is a plan's, where it has one."""

    ranks: int
    unplanned_bytes: int
    planned_bytes: int | None
    overhead: float | None
    fits: bool

    @property
    def answer(self) -> str:
        if not self.fits:
            return "no plan found"
        return "fits as it is" if self.overhead is None else f"fits with a plan, {self.overhead:.1%} more time"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReport:
    """What is asked of several devices together. All bytes and batches of the report are those of one rank."""

    ranks: int
    sharding: str
    link: str
    wrapper_bytes: int  # what the model's wrapper holds all the time, beside the step
    gathers_again: Option | None  # every whole parameter gathered a second time, as fully_shard does by itself
    by_ranks: tuple[RanksRow, ...]
    fewest: int | None  # ranks; None where no number was found

    @property
    def words(self) -> str:
        """How many ranks it takes, in a sentence."""
        if self.fewest is not None:
            return f"The smallest number of ranks found is {self.fewest}."
        if self.sharding == "ddp":
            return "Each rank holds the whole model, so that no number of them is enough."
        return "No number of ranks was found that is enough."


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
    plan_s: float  # of the asked batch
    search_s: float  # other batches, devices and numbers of ranks
    cluster: ClusterReport | None = None

    @property
    def fits(self) -> bool:
        """Whether the batch fits as it is."""
        return self.unplanned.needed_bytes <= self.usable_bytes

    @cached_property
    def fastest(self) -> Option | None:
        """The batch with the most samples a second, recomputation included."""
        return max(self.batches, key=lambda o: (o.samples_per_s, -o.batch), default=None)

    @property
    def _devices(self) -> str:
        if self.cluster is None:
            return self.device
        return f"each of {self.cluster.ranks} {self.device} by {self.cluster.sharding}"

    @property
    def verdict(self) -> str:
        """One sentence."""
        need, have = human_bytes(self.unplanned.needed_bytes), human_bytes(self.usable_bytes)
        where = f"{self.name} on {self._devices} (estimated): it needs {need}, and there are {have} for tensors"
        if self.fits:
            return f"Yes: {where}."
        if self.planned is not None:
            peak, more = human_bytes(self.planned.needed_bytes), f"{self.planned.overhead:.1%}"
            near = "" if self.gap is None else f" (within {self.gap:.1%} of the optimum)"
            moves = f" that moves {human_bytes(self.planned.moved_bytes)} a step" if self.planned.moved_bytes else ""
            return f"Yes, with a plan{moves}: {where}; planned it needs {peak} and {more} more time{near}."
        if self.floor_bytes > self.usable_bytes:
            return f"No: {where}; under any plan it needs at least {human_bytes(self.floor_bytes)}."
        return f"Not found: {where}; no plan was found that fits, and none is ruled out."

    def data(self) -> dict[str, Any]:
        """The report as plain data."""
        changes = [{**asdict(s), "change": s.change.value} for s in self.substitutions]
        return {**asdict(self), "substitutions": changes, "verdict": self.verdict, "fits": self.fits}
