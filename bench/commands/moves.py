"""`python -m bench moves`: moves to files, carried out and held against what was predicted."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.commands.options import (
    add_rows_out,
    add_workload,
    budgets,
    names_a_workload,
    one,
    positive,
    split_commas,
    strategy_specs,
    workload,
)
from planner.errors import PlannerError

HELP = (
    "A plan that moves tensors to files in a folder, carried out on the CPU: peak and waiting time as predicted for "
    "the measured link, against the meter; with copies as fast as they go, and held up to slower disks. Without a "
    "model: MobileNet, whose copies are hard to hide."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--offload-dir", type=Path, default=Path(), help="folder to move to (default: the current one)")
    parser.add_argument("--strategy", default="offload_only", help="as for `python -m bench` (default offload_only)")
    parser.add_argument("--budget", default="50%,30%,15%", help="as for `python -m bench` (default 50%%,30%%,15%%)")
    parser.add_argument(
        "--held-to",
        default="none,0.5,0.2",
        metavar="GB/S",
        help="speeds that copies are held up to, with commas; 'none': as fast as they go (default none,0.5,0.2)",
    )
    parser.add_argument("--rounds", type=positive, default=9, help="steps of each version in turn (default 9)")
    add_rows_out(parser)


def speeds(text: str) -> list[float | None]:
    """'none,0.2' as None and 0.2; PlannerError for what is no speed."""
    from planner.host_link import GIGA, parse_link

    found: list[float | None] = []
    for piece in split_commas(text):
        if "/" in piece:
            raise PlannerError(f"--held-to {piece}: one speed for both ways, such as 0.2")
        found.append(None if piece == "none" else parse_link(piece).out_bytes_per_s / GIGA)
    if not found:
        raise PlannerError("--held-to names none: write 'none', a speed in GB/s, or several with commas")
    return found


def run(options: argparse.Namespace) -> int:
    spec, limits = one("strategy", strategy_specs(options.strategy)), budgets(options.budget)
    held_to = speeds(options.held_to)
    if not options.offload_dir.is_dir():
        raise PlannerError(f"{options.offload_dir}: there is no such folder to move tensors to")
    from bench.experiments.moves import DEFAULT, run_moves

    run_moves(
        workload(options) if names_a_workload(options) else DEFAULT,
        strategy=spec,
        budgets=limits,
        speeds=held_to,
        folder=options.offload_dir,
        rounds=options.rounds,
        out=options.rows_file,
    )
    return 0
