"""`python -m bench graph`: the step before and after rewriting, to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

import strategies
from bench.commands.options import (
    LIBERTIES,
    WORKLOAD,
    add_liberties,
    add_workload,
    budgets,
    check_folder,
    one,
    refuse_together,
    seconds,
    strategy_specs,
    workload,
)
from planner.errors import NoPlan
from planner.ir import Graph
from planner.solve import Problem, Solution, solve_if_needed

HELP = "Show the step before and after rewriting: tables, DOT files, a page for the browser, the plan (figure, CSV)."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_liberties(parser)
    parser.add_argument("--strategy", default="auto", help="as for `python -m bench` (default auto)")
    parser.add_argument("--budget", default="60%", help="as for `python -m bench` (default 60%%)")
    parser.add_argument("--time-limit", type=seconds, default=5.0, help="seconds the strategy may take (default 5)")
    parser.add_argument("--graph", type=Path, help="a saved graph (graph.json of `profile`) instead of a model")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default out/)")


def run(options: argparse.Namespace) -> int:
    refuse_together(options, "--graph", [*WORKLOAD, *LIBERTIES], "a graph is planned on as it is")
    spec, budget = one("strategy", strategy_specs(options.strategy)), one("budget", budgets(options.budget))
    graph = None if options.graph is None else Graph.load(options.graph)
    check_folder(options.out)
    from bench.show.exports import write_graph
    from bench.show.terminal import console

    solution = _solution(graph or _measured(options), spec, budget, time_limit_s=options.time_limit)
    if solution.timeline is None:
        raise NoPlan(f"{spec} at {budget}: {solution.reason}")
    console.print(str(solution))
    console.print(solution.reason)
    for path in write_graph(options.out, solution):
        console.print(f"written: {path}")
    return 0


def _solution(graph: Graph, spec: str, budget: str, *, time_limit_s: float) -> Solution:
    problem = Problem.of(graph, budget, time_limit_s=time_limit_s)
    return solve_if_needed(problem, strategies.make(spec), label=spec)


def _measured(options: argparse.Namespace) -> Graph:
    from bench.experiments.prepared import measured_graph

    return measured_graph(workload(options))
