"""`python -m bench graph`: the step before and after rewriting, to look at."""

from __future__ import annotations

import argparse

from bench.commands import one_plan
from bench.commands.options import check_folder
from planner.errors import NoPlan

HELP = "Show the step before and after rewriting: tables, DOT files, a page for the browser, the plan (figure, CSV)."

add_options = one_plan.add_options


def run(options: argparse.Namespace) -> int:
    solution = one_plan.solved(options, before=lambda: check_folder(options.out))
    if solution.timeline is None:
        raise NoPlan(f"{options.strategy} at {options.budget}: {solution.reason}")
    from bench.show.exports import write_graph
    from bench.show.terminal import console

    console.print(str(solution))
    console.print(solution.reason)
    for path in write_graph(options.out, solution):
        console.print(f"written: {path}")
    return 0
