"""`python -m bench distributed`: replicas and shards on several processes of this machine."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, positive

HELP = "Eager DDP, eager FSDP2, FSDP2 with torch.utils.checkpoint, and planned, on processes of this machine."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="resnet18,bert", help="of the small ones: resnet18, bert (default: both)")
    parser.add_argument("--budget", default="85%,70%", help="as for `python -m bench` (default 85%%,70%%)")
    parser.add_argument("--ranks", type=positive, default=2, help="processes (default 2)")
    parser.add_argument("--pairs", type=positive, default=15, help="steps of each way, timed in turn (default 15)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.distributed.run import run_distributed
    from bench.experiments.distributed.worker import MODELS
    from planner.errors import PlannerError

    models = options.model.split(",")
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise PlannerError(f"model {unknown[0]!r}: there are {', '.join(MODELS)}")
    exact = run_distributed(
        models, options.budget.split(","), ranks=options.ranks, pairs=options.pairs, out=options.rows_file
    )
    return 0 if exact else 1
