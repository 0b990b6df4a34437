"""`python -m bench export`: a plan in the files that others read."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.commands import one_plan
from bench.commands.options import check_writable
from planner.exports.writing import ENDINGS, write_export

HELP = (
    "Write a plan for others to look at: snapshot.pickle for PyTorch's memory viewer (planned as device 0, as it is as "
    "device 1), trace.json for Perfetto, policy.json for selective checkpointing. Nothing of the plan is run."
)

add_options = one_plan.add_options


def run(options: argparse.Namespace) -> int:
    paths = [options.out / name for name in ENDINGS]
    solution = one_plan.solved(options, before=lambda: _check(options.out, paths))
    print(solution)
    for path in paths:
        write_export(path, solution)
        print(f"written: {path}")
    return 0


def _check(folder: Path, paths: list[Path]) -> None:
    """Notice before the work starts when a file cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        check_writable(path)
