"""`python -m bench distributed`: processes by torchrun on this machine, their rows in one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.experiments.distributed.rows import DISTRIBUTED, DistributedRow
from bench.experiments.results_file import save_rows
from bench.machine.separate_process import SeparateProcessError
from bench.show.terminal import say
from planner.files import decode

CAPTION = (
    "Peak: what the step adds on each rank; DDP holds its buckets beside it all the time. Step: the median of the "
    "slowest rank, one thread each, timed in turn. Exact: proven against eager of its kind, to the bit, on every rank"
)


def run_distributed(models: Sequence[str], budgets: Sequence[str], *, ranks: int, pairs: int, out: Path | None) -> bool:
    """Measure, print the table, save the rows; True if everything planned is exact."""
    with tempfile.TemporaryDirectory() as folder:
        say(f"{ranks} processes train {', '.join(models)}")
        _launch(folder, models, budgets, ranks=ranks, pairs=pairs)
        rows = _collected(Path(folder), ranks)
    DISTRIBUTED.print("Several processes", rows, caption=CAPTION)
    if out is not None:
        save_rows(out, DISTRIBUTED, rows)
    return all(row.exact is not False for row in rows)


def _launch(folder: str, models: Sequence[str], budgets: Sequence[str], *, ranks: int, pairs: int) -> None:
    arguments = [folder, ",".join(models), ",".join(budgets), str(pairs)]
    under_torchrun(["-m", "bench.experiments.distributed.worker", *arguments], ranks=ranks)


def under_torchrun(worker: Sequence[str], *, ranks: int) -> None:
    """Processes of this machine that run `worker` together, one thread each; SeparateProcessError if one fails."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launch, *worker],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
        raise SeparateProcessError("a process of torchrun failed", lines[0] if lines else "without a word")


def _collected(folder: Path, ranks: int) -> list[DistributedRow]:
    """The rows of all ranks, way by way."""
    read = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    of_ranks = [decode(tuple[DistributedRow, ...], rows, "rows") for rows in read]
    return [row for of_way in zip(*of_ranks, strict=True) for row in of_way]
