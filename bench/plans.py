"""`python -m bench plans`: strategies compared on full-size graphs with the times of a fixed roofline.

Nothing runs but capture and planning, so the table is the same on every machine, but for the seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from bench.planning import as_json, compare_graph
from bench.report import console, graph_caption, print_comparison
from bench.results import save_rows
from bench.workloads import WorkloadSpec
from planner.ir import Graph
from profiler.capture import capture
from profiler.cost import with_roofline_times

MODELS = (
    WorkloadSpec(model="resnet50", batch=8),
    WorkloadSpec(model="resnet152", batch=8),
    WorkloadSpec(model="bert", batch=16, seq=512),
    WorkloadSpec(model="gpt2", batch=8, seq=512),
    WorkloadSpec(model="densenet121", batch=8),
)


def run_plans(
    workloads: Sequence[WorkloadSpec],
    specs: Sequence[str],
    budgets: Sequence[str],
    *,
    time_limit_s: float,
    out: Path | None,
) -> list[dict[str, Any]]:
    """One table per model; the rows are saved after each."""
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("capturing", total=len(workloads) * len(budgets))
        for workload in workloads:
            bar.update(task, description=f"capturing {workload.title}")
            graph = roofline_graph(workload)
            found = []
            for budget in budgets:
                bar.update(task, advance=1, description=f"planning {workload.title} at {budget}")
                found += compare_graph(graph, specs, [budget], time_limit_s=time_limit_s)
            print_comparison(found, title=f"{workload.title}: strategies compared", caption=graph_caption(found))
            rows += as_json(found)
            if out is not None:
                command = f"python -m bench plans --strategy {','.join(specs)} --budget {','.join(budgets)}"
                save_rows(out, command=command, rows=rows)
    return rows


def roofline_graph(workload: WorkloadSpec) -> Graph:
    """The captured graph of a model with the fixed roofline's times."""
    step, model, optimizer, batch = workload.make()
    return with_roofline_times(capture(step, model, optimizer, batch, name=workload.title))
