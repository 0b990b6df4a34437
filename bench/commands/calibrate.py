"""`python -m bench calibrate`: how good estimates are, where they can be checked."""

from __future__ import annotations

import argparse

from bench.commands.options import (
    add_planning,
    add_rows_out,
    add_workload,
    budgets,
    names_a_workload,
    strategy_specs,
    workload,
)

HELP = (
    "Describe this CPU by a short benchmark, estimate the op times of a step from that, and compare them with measured "
    "ones; then the plans made from either. Without a model: the eight that the results folder shows."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_planning(parser, strategy="mutwo,ilp", budget="70%,50%", time_limit_s=3.0)
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.calibration.run import CASES, run_calibration

    run_calibration(
        [workload(options)] if names_a_workload(options) else CASES,
        strategy_specs(options.strategy),
        budgets(options.budget),
        time_limit_s=options.time_limit,
        out=options.rows_file,
    )
    return 0
