"""`python -m bench large`: models far too large for this machine."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, add_workload, names_a_workload, seconds, workload

HELP = (
    "Capture and plan models far too large for this machine, without memory for their tensors. "
    "Without a model: BERT-large, GPT-2 XL, ViT-L/16 and ResNet-152 at batch 256."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--time-limit", type=seconds, default=45.0, help="seconds for each plan (default 45)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.large import MODELS, run_large

    specs = [workload(options)] if names_a_workload(options) else MODELS
    run_large(specs, time_limit_s=options.time_limit, out=options.rows_file)
    return 0
