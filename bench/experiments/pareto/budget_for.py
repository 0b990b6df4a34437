"""`python -m bench pareto --budget-for 5%`: the least memory in which a step is at most so much slower."""

from __future__ import annotations

from dataclasses import dataclass

from bench.experiments.experiment import Experiment, line_by_line
from bench.show.terminal import console, stage
from planner.ir import Graph
from planner.simulator import unplanned
from planner.units import human_bytes
from strategies.frontier import budget_for


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetForRow:
    """One graph. No plan that recomputes once is at most so much slower in less than `floor_bytes`."""

    graph: str
    times: str
    at_most: float
    overhead: float
    peak_bytes: int
    floor_bytes: int
    start_bytes: int
    unplanned_peak_bytes: int

    @property
    def step_share(self) -> float:
        """What the step adds to memory, relative to the unplanned one."""
        added = self.unplanned_peak_bytes - self.start_bytes
        return (self.peak_bytes - self.start_bytes) / added if added else 1.0


def run_budget_for(graph: Graph, overhead: float, *, time_limit_s: float) -> BudgetForRow:
    """Search it, and print it as a sentence."""
    with stage(f"{graph.name}: the least memory at most {overhead:.1%} slower"):
        found = budget_for(graph, overhead=overhead, time_limit_s=time_limit_s)
    base = unplanned(graph)
    row = BudgetForRow(
        graph=graph.name,
        times=str(graph.timing),
        at_most=overhead,
        overhead=found.overhead,
        peak_bytes=found.peak_bytes,
        floor_bytes=found.floor_bytes,
        start_bytes=base.start_bytes,
        unplanned_peak_bytes=base.peak_bytes,
    )
    console.print(
        f"{row.graph}: at most {overhead:.1%} slower, the step runs in {human_bytes(row.peak_bytes)}, "
        f"{row.step_share:.1%} of what it adds to memory unplanned; {row.overhead:.2%} slower (times {row.times}). "
        f"Proven: no plan that recomputes once does so in less than {human_bytes(row.floor_bytes)}.\n"
        f"To use it: --budget {row.peak_bytes}",
        soft_wrap=True,
        highlight=False,
    )
    return row


COLUMNS = ("graph", "slower by at most", "slower by", "peak", "of step", "proven floor", "times")


def budget_for_cells(row: BudgetForRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    return (
        row.graph,
        f"{row.at_most:.1%}",
        f"{row.overhead:.2%}",
        human_bytes(row.peak_bytes),
        f"{row.step_share:.1%}",
        human_bytes(row.floor_bytes),
        row.times,
    )


BUDGET_FOR = Experiment(kind="budget_for", rows=(BudgetForRow,), table=line_by_line(COLUMNS, budget_for_cells))
