"""`python -m bench pareto`: the whole trade-off between memory and time, as a table and as a figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.options import (
    WORKLOAD,
    add_host_links,
    add_workload,
    budgets,
    check_folder,
    check_writable,
    given_graphs,
    host_links,
    refuse_together,
    seconds,
    strategy_specs,
    workload,
)

if TYPE_CHECKING:
    from planner.ir import Graph

HELP = (
    "The whole trade-off of a step: overhead against peak memory for every strategy, the proven bound of ilp under "
    "it, and the floor that no plan can go under. With --budget-for: only the least memory for an overhead."
)


STRATEGIES = "keep_all,sqrtn,cheap,mutwo,ilp"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", help=f"one, several with commas, or 'all' (default {STRATEGIES})")
    parser.add_argument(
        "--budget", help="points of the curve, with commas (default 100%%, 95%% and so on down to 10%%)"
    )
    parser.add_argument(
        "--budget-for", type=share, metavar="5%", help="instead: the least memory in which the step is 5%% slower"
    )
    add_workload(parser)
    parser.add_argument(
        "--roofline", action="store_true", help="times of a fixed A100-like roofline instead of measured ones"
    )
    add_host_links(parser)
    parser.add_argument("--graph", type=Path, help="a saved graph (graph.json of `profile`) instead of a model")
    parser.add_argument("--synthetic", help="made-up graphs instead: tower, unet, transformer, layered-300, ...")
    parser.add_argument("--time-limit", type=seconds, default=5.0, help="seconds for each budget (default 5)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figure (default out/)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")


def share(text: str) -> float:
    """'5%' as 0.05."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not text.endswith("%") or not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r}: write a share of the step's time, such as 5%")
    return value


def run(options: argparse.Namespace) -> int:
    from bench.experiments.pareto.budget_for import BUDGET_FOR, run_budget_for
    from bench.experiments.pareto.run import PARETO, run_pareto
    from bench.experiments.results_file import save_rows
    from strategies.frontier import BUDGETS

    _check_options(options)
    if options.json is not None:
        check_writable(options.json)
    specs = strategy_specs(options.strategy or STRATEGIES)
    limits = list(BUDGETS) if options.budget is None else budgets(options.budget)
    if options.budget_for is None:
        check_folder(options.out)
    limit_s, links = options.time_limit, host_links(options)
    graphs = _graphs(options)
    if options.budget_for is not None:
        answers = [run_budget_for(graph, options.budget_for, time_limit_s=limit_s) for graph in graphs]
        if options.json is not None:
            save_rows(options.json, BUDGET_FOR, answers)
        return 0
    found = [run_pareto(g, specs, limits, time_limit_s=limit_s, out=options.out, links=links) for g in graphs]
    if options.json is not None:
        save_rows(options.json, PARETO, [row for curve in found for row in curve.rows])
    return 0


def _check_options(options: argparse.Namespace) -> None:
    refuse_together(options, "--graph", ["--synthetic"], "say one of them")
    refuse_together(
        options,
        "--budget-for",
        ["--budget", "--strategy", "--host-link"],
        "ilp searches the budget for the overhead; leave that out",
    )
    for graph in ("--graph", "--synthetic"):
        refuse_together(options, graph, [*WORKLOAD, "--roofline"], "a graph has its own sizes and times")


def _graphs(options: argparse.Namespace) -> list[Graph]:
    if options.graph is None and options.synthetic is None:
        return [_captured(options)]
    return given_graphs(options)


def _captured(options: argparse.Namespace) -> Graph:
    from bench.experiments.prepared import measured_graph, roofline_graph

    return roofline_graph(workload(options)) if options.roofline else measured_graph(workload(options))
