"""`python -m bench fit`: will it train on a GPU that is not here, and at what cost?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.options import add_workload, check_folder, check_writable, positive, seconds, workload

if TYPE_CHECKING:
    from bench.fit.cluster import Cluster

HELP = (
    "Whether a step fits a GPU that need not be here, with and without a plan; the largest batches that do, and the "
    "smallest GPU that does. Needs no GPU and no memory for the model; all figures are estimates."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument(
        "--gpu", default="A100-40", help="a known device (A100-40, RTX3090, T4, ...) or a file, my_card.toml"
    )
    parser.add_argument(
        "--host-link", metavar="GB/S", help="what a plan may move tensors over, instead of the device's own; 0: nothing"
    )
    parser.add_argument(
        "--ranks", type=positive, help="as many of these GPUs in one server, each with the batch (with --shard)"
    )
    parser.add_argument(
        "--shard", choices=("ddp", "fsdp2"), help="how ranks share the work: replicas, or shards (default fsdp2)"
    )
    parser.add_argument("--time-limit", type=seconds, default=5.0, help="seconds for each plan (default 5)")
    parser.add_argument(
        "--real", action="store_true", help="make real tensors: for a model that cannot be made without memory"
    )
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    parser.add_argument("--out", type=Path, help="also draw a figure into this folder")


def run(options: argparse.Namespace) -> int:
    if options.json is not None:
        check_writable(options.json)
    if options.out is not None:
        check_folder(options.out)
    from bench.fit.printing import run_fit

    cluster = _cluster(options)
    report = run_fit(
        workload(options),
        options.gpu,
        host_link=options.host_link,
        time_limit_s=options.time_limit,
        without_memory=not options.real,
        json_file=options.json,
        out=options.out,
        cluster=cluster,
    )
    return 0 if report.fits or report.planned is not None else 1


def _cluster(options: argparse.Namespace) -> Cluster | None:
    from bench.fit.cluster import Cluster
    from planner.errors import PlannerError
    from profiler.tracing.ranks.imagined import Sharding

    if options.ranks is None:
        if options.shard is not None:
            raise PlannerError(f"--shard {options.shard} says how ranks share the work: say how many, --ranks 8")
        return None
    return Cluster(ranks=options.ranks, sharding=Sharding(options.shard or "fsdp2"))
