"""`python -m bench zoo`: how many of the libraries' architectures are served, and what keeps the others out."""

from __future__ import annotations

import argparse

from bench.commands.options import add_rows_out, positive, seconds, split_commas

HELP = (
    "Train one small model of every architecture of torchvision, timm and transformers, planned through both doors and "
    "plain, and compare every bit. Takes about an hour on two cores; with --out an interrupted run is gone on with. "
    "timm comes with pip install 'recompute-planner[zoo]'."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", help="those whose library/family contains one of these, with commas: timm/,llama"
    )
    parser.add_argument(
        "--door", choices=("both", "checkpoint", "checkpoint_model"), default="both", help="which doors"
    )
    parser.add_argument("--limit", type=seconds, default=180.0, help="seconds for one architecture (default 180)")
    parser.add_argument("--workers", type=positive, default=2, help="how many at a time, a thread each (default 2)")
    add_rows_out(parser)


def run(options: argparse.Namespace) -> int:
    from bench.experiments.zoo.rows import Door, Outcome
    from bench.experiments.zoo.run import run_zoo
    from bench.workloads.architectures.catalogue import chosen

    doors = [door for door in Door if options.door in ("both", door.value)]
    rows = run_zoo(
        chosen(split_commas(options.only)),
        doors,
        limit_s=options.limit,
        workers=options.workers,
        out=options.rows_file,
    )
    return 1 if any(row.outcome in (Outcome.SILENT, Outcome.FAILED) for row in rows) else 0
