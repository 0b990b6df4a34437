"""How fast planning itself is, and how it grows: lower + simulate, mutwo, and its whole curve."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from rich.progress import Progress

from bench.show.tables import print_table
from bench.show.terminal import console, say
from planner.analysis import candidates
from planner.ir import Graph
from planner.plan import recompute_once
from planner.schedule import lower
from planner.simulator import simulate
from planner.solve import Problem
from planner.synthetic import resnet_like
from strategies import make
from strategies.mutwo.greedy import curve

# (blocks per stage, ops per parameter update): about 1,000, 3,000, 3,500 (ResNet-152's own size) and 10,000 ops.
SIZES = (((2, 5, 20, 3), 5), ((3, 8, 36, 3), 13), ((3, 8, 36, 3), 16), ((9, 24, 108, 9), 15))


def run_micro(*, repeats: int = 7) -> None:
    """Measure on graphs of growing size and print a table of medians."""
    graphs = [resnet_like(blocks, ops_per_update=ops) for blocks, ops in SIZES]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing the planner", total=len(graphs))
        rows = []
        for graph in graphs:
            say(f"timing the planner on {len(graph.ops):,} ops")
            rows.append(_row(graph, repeats))
            progress.advance(task)
    columns = ("ops", "candidates", "lower + simulate", "mutwo, one budget", "mutwo, whole curve")
    print_table(
        "Planning speed",
        columns,
        rows,
        caption=f"milliseconds of processor time, median of {repeats}, resnet-like graphs",
    )


def _row(graph: Graph, repeats: int) -> tuple[str, ...]:
    plan = recompute_once(graph, candidates(graph)[::2])
    problem = Problem(graph=graph, budget_bytes=graph.start_bytes + 30 * 2**20)
    mutwo = make("mutwo")
    cells = (
        _median_ms(lambda: simulate(graph, lower(graph, plan)), repeats),
        _median_ms(lambda: mutwo.plan(problem), max(1, repeats // 2)),
        _median_ms(lambda: curve(graph), max(1, repeats // 2)),
    )
    return (f"{len(graph.ops):,}", f"{len(candidates(graph)):,}", *(f"{ms:,.1f}" for ms in cells))


def _median_ms(work: Callable[[], object], repeats: int) -> float:
    work()  # fill the graph's cached tables
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e3 * statistics.median(times)
