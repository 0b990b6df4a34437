"""What is told of one architecture through one door, and the tables made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bench.experiments.experiment import Results, Table
from bench.show.tables import markdown


class Door(Enum):
    """The ways in."""

    STEP = "checkpoint"
    MODEL = "checkpoint_model"


class Outcome(Enum):
    """How it went."""

    EXACT = "exact"  # planned and plain training equal to the bit
    NOTHING_TO_DO = "nothing to save"  # no plan takes less memory than the step itself, and that is said
    REFUSED = "refused"  # an error of ours said why, and nothing was changed
    TOLD = "difference told"  # the proof found a difference and said so
    SILENT = "SILENT DIFFERENCE"  # trained, other bits, and nobody said a word
    FAILED = "FAILED"  # an error that is none of ours, or no answer

    @property
    def is_served(self) -> bool:
        return self in (Outcome.EXACT, Outcome.NOTHING_TO_DO)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooRow:
    """One architecture through one door."""

    library: str
    family: str
    model: str
    door: Door
    outcome: Outcome
    note: str = ""
    budget: str = ""  # the smallest of those tried that a plan fits
    way: str = ""  # of the model door
    peak_ratio: float | None = None  # what the step adds, planned to plain, measured
    prediction_error: float | None = None  # of the planned peak, relative to the measured one
    time_ratio: float | None = None
    prepare_s: float | None = None

    @property
    def key(self) -> tuple[str, str, Door]:
        return self.library, self.family, self.door


COLUMNS = (
    "library",
    "family",
    "model",
    "door",
    "outcome",
    "budget",
    "way",
    "peak",
    "off by",
    "time",
    "prepared in",
    "note",
)


def zoo_cells(row: ZooRow) -> Sequence[str]:
    """One line of the table."""
    return (
        row.library,
        row.family,
        row.model,
        row.door.value,
        row.outcome.value,
        row.budget or "-",
        row.way or "-",
        _shown(row.peak_ratio, ".2f"),
        _shown(row.prediction_error, "+.2%"),
        _shown(row.time_ratio, ".2f", "x"),
        _shown(row.prepare_s, ".1f", " s"),
        row.note[:160],
    )


def _shown(number: float | None, form: str, unit: str = "") -> str:
    return "-" if number is None else f"{number:{form}}{unit}"


def pass_rates(rows: Sequence[ZooRow]) -> Table:
    """How many of each library are served, by door and by at least one."""
    libraries = [*dict.fromkeys(row.library for row in rows), "all"]
    columns = ("library", "architectures", *(door.value for door in Door), "at least one")
    return columns, [_rates(library, rows) for library in libraries]


def _rates(library: str, rows: Sequence[ZooRow]) -> list[str]:
    mine = [row for row in rows if library in (row.library, "all")]
    families = {(row.library, row.family) for row in mine}
    served = {door: {(r.library, r.family) for r in mine if r.door is door and r.outcome.is_served} for door in Door}
    counts = [len(served[door]) for door in Door] + [len(set().union(*served.values()))]
    return [library, str(len(families)), *(f"{n} ({n / max(1, len(families)):.1%})" for n in counts)]


def reasons(rows: Sequence[ZooRow]) -> Table:
    """What was not served, and why: each reason once, with who it met."""
    met = Counter((row.door.value, row.outcome.value, _gist(row.note)) for row in rows if not row.outcome.is_served)
    lines = []
    for (door, outcome, note), count in met.most_common():
        who = [r.family for r in rows if (r.door.value, r.outcome.value, _gist(r.note)) == (door, outcome, note)]
        lines.append([door, outcome, str(count), note, ", ".join(who[:6]) + (" ..." if count > 6 else "")])
    return ("door", "outcome", "how many", "why", "which"), lines


def _gist(note: str) -> str:
    """The beginning of a note: what follows it are names and numbers of one model."""
    return note.partition(": ")[0][:100] if len(note) > 100 else note


def summary(results: Results[ZooRow]) -> str:
    """The pass rates and the reasons, for the page."""
    parts = [f"## Served\n\n{markdown(*pass_rates(results.rows))}"]
    columns, lines = reasons(results.rows)
    if lines:
        parts.append(f"## Not served, and why\n\n{markdown(columns, lines)}")
    return "\n\n".join(parts)
