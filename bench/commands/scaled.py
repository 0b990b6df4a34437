"""`python -m bench scaled`: peaks at batches that were never captured."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, add_workload, names_a_workload, workload

HELP = (
    "Predict the peak at a batch from captures at a quarter and half of it, and measure it. "
    "Without a model: ResNet-50, MobileNetV3 and BERT."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.scaled import CASES, run_scaled

    run_scaled([workload(options)] if names_a_workload(options) else CASES, out=options.rows_file)
    return 0
