"""`python -m bench accuracy`: predictions against meters."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, add_workload, names_a_workload, positive, workload

HELP = (
    "Simulated peak against the allocator's and the process's own; op times against the step's. "
    "Without a model: the five that the results folder shows."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument(
        "--pairs", type=positive, default=15, help="eager and captured steps timed in turn (default 15)"
    )
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.accuracy import CASES, run_accuracy

    specs = [workload(options)] if names_a_workload(options) else CASES
    run_accuracy(specs, pairs=options.pairs, out=options.rows_file)
    return 0
