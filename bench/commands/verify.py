"""`python -m bench verify`: proof on a step that the planned one does the same arithmetic."""

from __future__ import annotations

import argparse

from bench.commands.options import add_liberties, add_workload, budgets, one, positive, strategy_specs, workload

HELP = "Plan a step, run it and the plain one from the same state, and compare every bit they leave."


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_liberties(parser)
    parser.add_argument("--strategy", default="auto", help="as for `python -m bench` (default auto)")
    parser.add_argument("--budget", default="70%", help="as for `python -m bench` (default 70%%)")
    parser.add_argument("--steps", type=positive, default=3, help="training steps to compare (default 3)")


def run(options: argparse.Namespace) -> int:
    spec, budget = one("strategy", strategy_specs(options.strategy)), one("budget", budgets(options.budget))
    from bench.experiments.verification import verify_model
    from profiler.measuring.memory import guarded

    work = workload(options)
    exact = guarded(f"verifying {work.title}", lambda: verify_model(work, spec, budget, steps=options.steps))
    return 0 if exact else 1
