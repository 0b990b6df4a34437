"""The rows of a sweep over batch sizes, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

from bench.workloads.spec import WorkloadSpec
from planner.solve import Status
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One batch size: run, or planned and predicted where it does not fit. Bytes are of total peak."""

    model: str
    batch: int
    free_gradients: bool
    early_updates: bool
    strategy: str
    status: Status
    budget_bytes: int
    smallest_peak_bytes: int | None  # that was found, fitting or not
    start_bytes: int
    by_role_eager: dict[str, int]
    by_role_planned: dict[str, int]
    predicted_overhead: float | None
    measured: bool
    why_predicted: str
    note: str
    exact: bool | None
    eager_s: float | None
    planned_s: float | None
    eager_peak_bytes: int
    planned_peak_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.status is Status.FITS


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings(WorkloadSpec):
    """What all rows of one file share: the work without a batch size, and how it is planned and timed."""

    strategy: str
    budget: str
    pairs: int
    time_limit_s: float

    def title_of(self, what: str) -> str:
        """The title of a table or a figure."""
        return f"{self.title_of_all_batches}: {what} against batch size, {self.strategy} at {self.budget}"


COLUMNS = ("batch", "peak eager", "planned", "less by", "step eager", "planned", "time ratio", "exact", "how")


def sweep_cells(row: SweepRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    eager, planned = row.eager_peak_bytes, row.planned_peak_bytes
    eager_s, planned_s = row.eager_s, row.planned_s
    return (
        str(row.batch),
        human_bytes(eager),
        _planned_peak(row),
        "-" if planned is None else f"{1 - planned / eager:.0%}",
        "-" if eager_s is None else f"{eager_s:.2f} s",
        "-" if planned_s is None else f"{planned_s:.2f} s",
        "-" if eager_s is None or planned_s is None else f"{planned_s / eager_s:.2f}x",
        "-" if row.exact is None else ("yes" if row.exact else "NO"),
        "measured" if row.measured else f"predicted: {row.why_predicted}",
    )


def _planned_peak(row: SweepRow) -> str:
    """The planned peak; where none fits the status, and the smallest peak that was found."""
    planned, smallest = row.planned_peak_bytes, row.smallest_peak_bytes
    if row.fits:
        return "-" if planned is None else human_bytes(planned)
    return row.status.value if smallest is None else f"{row.status.value}: smallest found {human_bytes(smallest)}"
