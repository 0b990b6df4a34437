"""`python -m bench plans`: strategies on full-size graphs with the times of a fixed roofline."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, add_workload, names_a_workload, split_commas, strategy_specs, workload

HELP = (
    "Compare strategies on captured graphs of full size, with the times of a fixed A100-like roofline. "
    "Without a model: ResNet-50 and -152, BERT, GPT-2 and DenseNet-121."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--strategy", default="keep_all,sqrtn,cheap,mutwo:faithful=true,mutwo,ilp", help="as above")
    parser.add_argument("--budget", default="90%,70%,50%,40%,30%", help="as for `python -m bench`")
    parser.add_argument("--time-limit", type=float, default=12.0, help="seconds a strategy may take (default 12)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.plans import MODELS, run_plans

    run_plans(
        [workload(options)] if names_a_workload(options) else MODELS,
        strategy_specs(options.strategy),
        split_commas(options.budget),
        time_limit_s=options.time_limit,
        out=options.rows_file,
    )
    return 0
