"""`python -m bench micro`: how fast the planner itself is."""

from __future__ import annotations

import argparse

from bench.commands.options import positive

HELP = "Time the planner itself."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=positive, default=7, help="runs per figure; the median counts (default 7)")


def run(options: argparse.Namespace) -> int:
    from bench.experiments.micro import run_micro

    run_micro(repeats=options.repeats)
    return 0
