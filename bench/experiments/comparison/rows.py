"""The rows of a comparison: planned steps and peers, both relative to eager, and their tables on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from planner.solve import Status
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRow:
    """One strategy at one budget on one model. Bytes are of total peak; ratios are to the eager step."""

    model: str
    free_gradients: bool
    early_updates: bool
    strategy: str
    budget: str
    status: Status
    budget_bytes: int
    start_bytes: int
    eager_peak_bytes: int
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    predicted_overhead: float | None
    measured_ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    eager_s: float | None
    dropped: int
    reruns: int
    gap: float | None
    plan_s: float
    apply_s: float | None
    exact: bool | None
    note: str
    step_share: float | None  # what the planned step adds to memory, relative to eager: 0.5 is half
    prediction_error: float | None  # measured less predicted peak above the start, relative to measured
    planned_s: float | None = None  # not in files of before it was kept
    moved_bytes: int | None = None  # to the host and back, in every step
    predicted_stall_s: float | None = None  # of every step, waiting for that
    measured_stall_s: float | None = None
    cpu_ratio: float | None = None  # processor time to eager's: steadier than the clock's on a machine that is shared


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """What users would pick instead, or the planned model. Ratios are to eager in the same process.

    `error` says why there are none.
    """

    model: str
    peer: str
    error: str
    peak_ratio: float | None = None  # of what the step adds to memory
    time_ratio: float | None = None
    time_low: float | None = None
    time_high: float | None = None
    exact: bool | None = None
    first_mismatch: str = ""
    largest_difference: float | None = None
    cpu_ratio: float | None = None  # of processor time
    promise: str = ""  # of a planned model: by which way it is planned, and what that promises


PLANNED_COLUMNS = (
    "budget", "strategy", "status", "peak predicted", "measured", "of eager's step", "time predicted", "measured",
    "dropped", "gap", "plan s", "exact",
)  # fmt: skip


def planned_cells(row: PlannedRow) -> tuple[str, ...]:
    """A row as text, in the order of PLANNED_COLUMNS."""

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    return (
        row.budget,
        row.strategy,
        row.status.value,
        "-" if row.predicted_peak_bytes is None else human_bytes(row.predicted_peak_bytes),
        "-" if row.measured_peak_bytes is None else human_bytes(row.measured_peak_bytes),
        show(row.step_share, "{:.0%}"),
        show(None if row.predicted_overhead is None else 1 + row.predicted_overhead, "{:.2f}x"),
        show(row.measured_ratio, "{:.2f}x"),
        str(row.dropped),
        show(row.gap, "{:.1%}"),
        f"{row.plan_s:.2f}",
        "-" if row.exact is None else ("yes" if row.exact else f"NO: {row.note}"),
    )


PEER_COLUMNS = ("what", "peak", "time", "quartiles", "CPU time", "exact", "first difference")


def peer_cells(row: PeerRow) -> tuple[str, ...]:
    """A row as text, in the order of PEER_COLUMNS."""
    if row.error:
        return (row.peer, "-", "-", "-", "-", "-", row.error)
    return (
        row.peer,
        f"{row.peak_ratio:.2f}",
        f"{row.time_ratio:.2f}x",
        f"{row.time_low:.2f}-{row.time_high:.2f}",
        "-" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}x",
        "yes" if row.exact else "NO",
        row.first_mismatch,
    )
