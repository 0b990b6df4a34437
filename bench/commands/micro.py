"""`python -m bench micro`: how fast the planner itself is."""

from __future__ import annotations

import argparse

from bench.commands.options import positive

HELP = "Time the planner itself."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="MODELS",
        help="instead: what capture, second trace, audit, proof and the guards cost on these models, with commas",
    )
    parser.add_argument("--repeats", type=positive, default=7, help="runs per figure; the median counts (default 7)")


def run(options: argparse.Namespace) -> int:
    from bench.experiments.micro import run_micro
    from bench.experiments.trust import run_trust
    from bench.workloads.spec import WorkloadSpec

    if options.trust is not None:
        run_trust([WorkloadSpec(model=name) for name in options.trust.split(",")])
        return 0
    run_micro(repeats=options.repeats)
    return 0
