"""`python -m bench arena`: what each idea of memory planning is worth."""

from __future__ import annotations

import argparse

from bench.commands.options import (
    add_rows_out,
    add_workload,
    budgets,
    names_a_workload,
    one,
    strategy_specs,
    workload,
)

HELP = (
    "The memory of a step when nothing is reused, when lifetimes that do not overlap share addresses, when ops run in "
    "place, and when it is planned; and what PyTorch's allocator would hold for each. Without a model: ResNet-152, "
    "BERT, GPT-2 and DenseNet-121. Nothing is run. With --execute planned steps run in an arena and under the "
    "allocator, in turn (ResNet-152, BERT and GPT-2)."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--strategy", default="mutwo", help="as for `python -m bench` (default mutwo)")
    parser.add_argument("--budget", default="50%", help="as for `python -m bench` (default 50%%)")
    parser.add_argument("--execute", action="store_true", help="run planned steps in an arena, beside the allocator")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    spec, budget = one("strategy", strategy_specs(options.strategy)), one("budget", budgets(options.budget))
    from bench.experiments.arena import MODELS, run_arena
    from bench.experiments.arena_execution import EXECUTED, run_executed

    named = [workload(options)] if names_a_workload(options) else None
    if options.execute:
        run_executed(named or EXECUTED, strategy=spec, budget=budget, out=options.rows_file)
    else:
        run_arena(named or MODELS, strategy=spec, budget=budget, out=options.rows_file)
    return 0
