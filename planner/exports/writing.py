"""Which file a plan is exported to: told by the end of its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from planner.errors import FileFormatError, NoPlan
from planner.exports.policy import policy_of
from planner.exports.snapshot import write_snapshot
from planner.exports.trace import write_trace
from planner.solve import Solution

Write = Callable[[Path, Solution], None]


def _write_policy(path: Path, solution: Solution) -> None:
    policy_of(solution).save(path)


# How a name ends -> what is written.
ENDINGS: dict[str, Write] = {
    "snapshot.pickle": write_snapshot,
    "trace.json": write_trace,
    "policy.json": _write_policy,
}


def write_export(path: str | Path, solution: Solution) -> None:
    """Write what the name asks for; FileFormatError for a name that asks for nothing, or cannot be written."""
    write = writer_of(path)
    if solution.schedule is None:
        raise NoPlan(f"{solution.strategy} has no plan to export: {solution.reason}")
    write(Path(path), solution)


def writer_of(path: str | Path) -> Write:
    """What writes a file of that name."""
    for ending, write in ENDINGS.items():
        if Path(path).name.endswith(ending):
            return write
    raise FileFormatError(
        f"{path}: what to export is told by the end of the name: snapshot.pickle for PyTorch's memory viewer, "
        "trace.json for Perfetto, policy.json for selective checkpointing"
    )
