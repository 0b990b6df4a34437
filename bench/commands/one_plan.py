"""What `graph` and `export` have in common: one plan for one step, captured here or saved before."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import strategies
from bench.commands.options import (
    LIBERTIES,
    WORKLOAD,
    add_liberties,
    add_planning,
    add_workload,
    budgets,
    one,
    refuse_together,
    strategy_specs,
    workload,
)
from planner.ir import Graph
from planner.solve import Problem, Solution, solve_if_needed


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_liberties(parser)
    add_planning(parser, strategy="auto", budget="60%", time_limit_s=5.0)
    parser.add_argument("--graph", type=Path, help="a saved graph (graph.json of `profile`) instead of a model")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the files (default out/)")


def solved(options: argparse.Namespace, *, before: Callable[[], object]) -> Solution:
    """The plan asked for. `before` is called once the options are known to be good, before anything is measured."""
    refuse_together(options, "--graph", [*WORKLOAD, *LIBERTIES], "a graph is planned on as it is")
    spec, budget = one("strategy", strategy_specs(options.strategy)), one("budget", budgets(options.budget))
    graph = None if options.graph is None else Graph.load(options.graph)
    before()
    problem = Problem.of(graph or _measured(options), budget, time_limit_s=options.time_limit)
    return solve_if_needed(problem, strategies.make(spec), label=spec)


def _measured(options: argparse.Namespace) -> Graph:
    from bench.experiments.prepared import measured_graph

    return measured_graph(workload(options))
