"""`python -m bench plans`: strategies on full-size graphs with the times of a fixed roofline."""

from __future__ import annotations

import argparse

from bench.commands.options import (
    add_host_links,
    add_planning,
    add_rows_out,
    add_workload,
    budgets,
    host_links,
    names_a_workload,
    strategy_specs,
    workload,
)

HELP = (
    "Compare strategies on captured graphs of full size, with the times of a fixed A100-like roofline. "
    "Without a model: ResNet-50 and -152, BERT, GPT-2, DenseNet-121, and random layered nets at 70 and 50%."
)
STRATEGIES = "keep_all,sqrtn,cheap,mutwo:faithful=true,mutwo,ilp,ilp:seeds=false"
BUDGETS = "90%,70%,50%,40%,30%"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_planning(parser, strategy=STRATEGIES, budget=BUDGETS, time_limit_s=12.0)
    add_host_links(parser)
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.plans.run import MODELS, layered_cases, model_cases, run_plans

    specs, limits = strategy_specs(options.strategy), budgets(options.budget)
    named = names_a_workload(options)
    cases = model_cases([workload(options)] if named else MODELS, limits, options.time_limit)
    run_plans(cases if named else [*cases, *layered_cases()], specs, out=options.rows_file, links=host_links(options))
    return 0
