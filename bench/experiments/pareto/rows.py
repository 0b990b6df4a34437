"""The rows of a trade-off, overhead against peak: as one curve, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.experiments.experiment import Table
from bench.experiments.host_links import JOINS
from planner.errors import FileFormatError
from planner.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffRow:
    """One strategy within one budget. Without a plan that fits, `peak_bytes` and `overhead` are None.

    `bound` is the proven least overhead of any plan that recomputes once there, where the strategy proves one;
    `impossible` says that it has proven that there is no such plan, `cut_off` that the time limit ended its search.
    """

    graph: str
    strategy: str
    budget: str
    budget_bytes: int
    peak_bytes: int | None
    overhead: float | None
    bound: float | None
    impossible: bool
    found_by: str
    solve_s: float
    # What all rows of one graph share: enough to draw them again.
    times: str
    start_bytes: int
    floor_bytes: int  # no plan at all runs in less
    unplanned_peak_bytes: int
    host_link: str = ""  # what it may move tensors to the host over
    solve_cpu_s: float | None = None  # processor time; None where several budgets share it
    cut_off: bool | None = None  # None in rows from before it was noted


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """The rows of one graph, by strategy from the largest budget to the smallest."""

    rows: tuple[TradeOffRow, ...]

    @staticmethod
    def of_one_graph(rows: Sequence[TradeOffRow]) -> TradeOff:
        """Rows as a curve; FileFormatError for those of no graph, or of several."""
        graphs = sorted({row.graph for row in rows})
        if len(graphs) != 1:
            raise FileFormatError(
                f"rows of {', '.join(graphs) or 'no graph'} are not one curve: save each graph to a file of its own, "
                "by `python -m bench pareto --json FILE`"
            )
        return TradeOff(rows=tuple(rows))

    @property
    def graph(self) -> str:
        return self.rows[0].graph

    @property
    def times(self) -> str:
        return self.rows[0].times

    @property
    def start_bytes(self) -> int:
        return self.rows[0].start_bytes

    @property
    def peak_bytes(self) -> int:
        """Unplanned."""
        return self.rows[0].unplanned_peak_bytes

    @property
    def floor_bytes(self) -> int:
        return self.rows[0].floor_bytes

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(row.strategy for row in self.rows))

    @property
    def links(self) -> list[str]:
        """The ways to the host that plans were made for, the one without any first."""
        return list(dict.fromkeys(row.host_link for row in sorted(self.rows, key=lambda row: bool(row.host_link))))

    def of(self, strategy: str) -> list[TradeOffRow]:
        return [row for row in self.rows if row.strategy == strategy]


# -- telling ------------------------------------------------------------------------------------------------------


def caption(found: TradeOff) -> str:
    """What a table of the curve has to say beside its figures."""
    clock = " (with a link, of a processor)" if len(found.links) > 1 else ""
    seconds = ", ".join(f"{name} {sum(map(_seconds, found.of(name))):.1f}" for name in found.strategies)
    return (
        f"Times {found.times}. Unplanned peak {human_bytes(found.peak_bytes)}, {human_bytes(found.start_bytes)} of it "
        f"before the step; no plan at all runs in less than {human_bytes(found.floor_bytes)}. "
        f"Seconds of planning{clock}: {seconds}.{_cut_off(found)}"
    )


def _cut_off(found: TradeOff) -> str:
    """Where more time may find more."""
    budgets = {name: [row.budget for row in found.of(name) if row.cut_off] for name in found.strategies}
    places = "; ".join(f"{name} at {', '.join(at)}" for name, at in budgets.items() if at)
    return f" Cut off by the time limit, so that another run may differ: {places}." if places else ""


def _seconds(row: TradeOffRow) -> float:
    return row.solve_s if row.solve_cpu_s is None else row.solve_cpu_s


def overhead_table(found: TradeOff) -> Table:
    """A line per budget: the overhead of every strategy, and the proven bound with the gap of what proves it.

    With links there are too many for columns: a line per budget and link, and below it one for each strategy.
    """
    if len(found.links) > 1:
        return _long_table(found)
    proving = [name for name in found.strategies if any(row.bound is not None for row in found.of(name))]
    columns = ["budget", "peak at most", *found.strategies]
    columns += [text for name in proving for text in (f"least by {name}", "gap", "found by")]
    lines = []
    for at in zip(*(found.of(name) for name in found.strategies), strict=True):
        line = [at[0].budget, human_bytes(at[0].budget_bytes), *(_overhead(row) for row in at)]
        for row in (row for row in at if row.strategy in proving):
            line += _proof(row)
        lines.append(line)
    return columns, lines


LONG = (
    "budget",
    "peak at most",
    "host link",
    "strategy",
    "more time",
    "proven least",
    "gap",
    "found by",
    "CPU seconds",
)


def _long_table(found: TradeOff) -> Table:
    order = {link: i for i, link in enumerate(found.links)}
    rows = sorted(found.rows, key=lambda row: (-row.budget_bytes, order[row.host_link]))
    return LONG, [_long_line(row) for row in rows]


def _long_line(row: TradeOffRow) -> tuple[str, ...]:
    spec = row.strategy.partition(JOINS)[0]
    seconds = "-" if row.solve_cpu_s is None else f"{row.solve_cpu_s:.1f}"
    size = human_bytes(row.budget_bytes)
    return row.budget, size, row.host_link or "none", spec, _overhead(row), *_proof(row), seconds


def _overhead(row: TradeOffRow) -> str:
    return "-" if row.overhead is None else f"{row.overhead:.2%}"


def _proof(row: TradeOffRow) -> tuple[str, str, str]:
    if row.impossible or row.bound is None:
        return "no plan" if row.impossible else "-", "-", "-"
    gap = "-" if row.overhead is None else f"{1 - row.bound / row.overhead if row.overhead else 0.0:.1%}"
    return f"{row.bound:.2%}", gap, row.found_by or "-"
