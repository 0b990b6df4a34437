"""`python -m bench profile`: what a training step is made of."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.commands.options import add_workload, check_folder, workload

HELP = "Capture one training step, measure every op, and show what it is made of."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument(
        "--out", type=Path, help="write graph.json, node_stats.csv, activation_stats.csv and figures here"
    )


def run(options: argparse.Namespace) -> int:
    if options.out is not None:
        check_folder(options.out)
    from bench.experiments.profiling import run_profile
    from profiler.measuring.memory import guarded

    work = workload(options)
    guarded(f"profiling {work.title}", lambda: run_profile(work, out=options.out))
    return 0
