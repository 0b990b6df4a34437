"""`python -m bench exactness`: the matrix of what was proved equal to eager."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, positive, strategy_specs

HELP = (
    "Prove models x optimizers x strategies equal to eager, to the bit, with all dropped that can be; then with all "
    "moved to files that can be, and through the model door at the smallest budget that fits."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", default="sqrtn,cheap,mutwo,ilp,auto", help="as for `python -m bench`")
    parser.add_argument("--steps", type=positive, default=10, help="training steps to compare (default 10)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.exactness import run_exactness

    return 0 if run_exactness(strategy_specs(options.strategy), steps=options.steps, out=options.rows_file) else 1
