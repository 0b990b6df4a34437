"""`python -m bench plans`: strategies compared on full-size graphs with the times of a fixed roofline.

Nothing runs but capture and planning, so the tables are the same on every machine, but for the seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import Progress

from bench.experiments.plans.rows import PLANS, PlanRow, compare_graph
from bench.experiments.plans.smallest_budgets import SMALLEST_BUDGETS, SmallestRow, print_smallest, smallest_budgets
from bench.experiments.prepared import roofline_graph
from bench.experiments.results_file import save_rows
from bench.show.tables import graph_caption, print_comparison
from bench.show.terminal import console, say
from bench.workloads.made_up_graphs import LAYERED_NODES, SYNTHETIC
from bench.workloads.spec import WorkloadSpec
from planner.host_link import HostLink
from planner.ir import Graph

MODELS = (
    WorkloadSpec(model="resnet50", batch=8),
    WorkloadSpec(model="resnet152", batch=8),
    WorkloadSpec(model="bert", batch=16, seq=512),
    WorkloadSpec(model="gpt2", batch=8, seq=512),
    WorkloadSpec(model="densenet121", batch=8),
)
LAYERED_BUDGETS = ("70%", "50%")
LAYERED_TIME_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph to plan on, made when its turn comes."""

    title: str
    make: Callable[[], Graph]
    budgets: Sequence[str]
    time_limit_s: float


def model_cases(workloads: Sequence[WorkloadSpec], budgets: Sequence[str], time_limit_s: float) -> list[Case]:
    """Captured models with roofline times."""
    return [
        Case(title=w.title, make=partial(roofline_graph, w), budgets=budgets, time_limit_s=time_limit_s)
        for w in workloads
    ]


def layered_cases() -> list[Case]:
    """Random layered nets: nothing in them repeats, so that no strategy profits from regular blocks."""
    names = [f"layered-{n}" for n in LAYERED_NODES]
    return [
        Case(title=name, make=SYNTHETIC[name], budgets=LAYERED_BUDGETS, time_limit_s=LAYERED_TIME_LIMIT_S)
        for name in names
    ]


def run_plans(
    cases: Sequence[Case], specs: Sequence[str], *, out: Path | None, links: Sequence[HostLink] = ()
) -> list[PlanRow]:
    """Two tables a graph, of strategies at budgets and of the smallest budgets met; the rows are saved after each."""
    rows: list[PlanRow] = []
    smallest: list[SmallestRow] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("capturing", total=sum(1 + len(case.budgets) for case in cases))

        def tell(text: str, *, advance: int = 1) -> None:
            bar.update(task, advance=advance, description=text)
            say(text)

        for case in cases:
            tell(f"making the graph of {case.title}", advance=0)
            graph = case.make()
            found = []
            for budget in case.budgets:
                tell(f"planning {case.title} at {budget}")
                found += compare_graph(graph, specs, [budget], time_limit_s=case.time_limit_s, links=links)
            print_comparison(found, title=f"{case.title}: strategies compared", caption=graph_caption(found))
            tell(f"smallest budgets of {case.title}")
            met = smallest_budgets(graph, specs, time_limit_s=case.time_limit_s)
            print_smallest(met)
            rows += [PlanRow.of(row) for row in found]
            smallest += met
            if out is not None:
                save_rows(out, PLANS, rows)
                save_rows(smallest_file(out), SMALLEST_BUDGETS, smallest)
    return rows


def smallest_file(out: Path) -> Path:
    """Where the rows of the smallest budgets are kept: beside the others."""
    return out.with_name(f"{out.stem}_smallest.json")
