"""`python -m bench ablation`: what each part of the planner is worth at one budget."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, add_workload, budgets, names_a_workload, one, workload

HELP = (
    "What each part of the planner is worth: taken away or added, at one budget, on captured graphs of full size with "
    "the times of a fixed A100-like roofline. Without a model: ResNet-152 and BERT."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--budget", default="50%", help="as for `python -m bench`, one (default 50%%)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.ablation import MODELS, run_ablation

    specs = [workload(options)] if names_a_workload(options) else MODELS
    run_ablation(specs, budget=one("budget", budgets(options.budget)), out=options.rows_file)
    return 0
