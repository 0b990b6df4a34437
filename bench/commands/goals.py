"""`python -m bench goals`: how soon plans are proven, against goals."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.commands.options import add_rows_out, positive
from planner.errors import PlannerError

HELP = "Plan full-size graphs and compare the proven gap and the processor time with goals set for each."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=3, help="runs per goal; the median counts (default 3)")
    parser.add_argument(
        "--graphs", type=Path, help="keep the measured graphs in this folder, and take those that are there"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only graphs with this in their title")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.goals import CASES, run_goals

    cases = [case for case in CASES if options.only in case.spec.title]
    if not cases:
        titles = ", ".join(case.spec.title for case in CASES)
        raise PlannerError(f"no graph has {options.only!r} in its title; there are {titles}")
    run_goals(cases, repeats=options.repeats, graphs=options.graphs, out=options.rows_file)
    return 0
