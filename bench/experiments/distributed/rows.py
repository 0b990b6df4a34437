"""What is measured of a way to train on several processes, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.experiments.experiment import Experiment, Table
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedRow:
    """One way of training one model, as one rank saw it.

    `peak_bytes` is above what was live before the step. `exact` is None for eager itself.
    """

    model: str
    way: str
    budget: str  # "" for what has none
    ranks: int
    rank: int
    peak_bytes: int
    step_s: float  # the median of those timed, in turn with the other ways
    exact: bool | None
    prediction_error: float | None
    refused: str = ""


def table(rows: Sequence[DistributedRow]) -> Table:
    """One line for every way: peaks of all ranks, the slowest rank's time, and that beside eager's of the kind."""
    ways: dict[tuple[str, str, str], list[DistributedRow]] = {}
    for row in rows:
        ways.setdefault((row.model, row.way, row.budget), []).append(row)
    columns = ("model", "way", "budget", "peak per rank", "step", "to eager", "exact", "prediction")
    return columns, [_line(key, found, ways) for key, found in ways.items()]


def _line(
    key: tuple[str, str, str], rows: list[DistributedRow], ways: dict[tuple[str, str, str], list[DistributedRow]]
) -> Sequence[str]:
    model, way, budget = key
    refused = next((row.refused for row in rows if row.refused), "")
    if refused:
        return model, way, budget or "-", "-", "-", "-", f"refused: {refused.partition('. ')[0]}", "-"
    seconds = max(row.step_s for row in rows)
    eager = ways.get((model, way.split()[0], ""))
    to_eager = "-" if not eager else f"{seconds / max(row.step_s for row in eager):.2f}x"
    exact = {row.exact for row in rows}
    errors = [abs(row.prediction_error) for row in rows if row.prediction_error is not None]
    return (
        model,
        way,
        budget or "-",
        ", ".join(human_bytes(row.peak_bytes) for row in rows),
        f"{seconds * 1e3:.1f} ms",
        to_eager,
        "-" if exact == {None} else "yes" if exact == {True} else "NO",
        f"{max(errors):.2%}" if errors else "-",
    )


DISTRIBUTED = Experiment(kind="distributed", rows=(DistributedRow,), table=table)
