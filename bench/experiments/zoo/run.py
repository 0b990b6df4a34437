"""Every architecture through both doors, each in a process of its own; gone on with where it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.results_file import resumed_rows, save_rows
from bench.experiments.zoo.rows import COLUMNS, Door, Outcome, ZooRow, pass_rates, reasons, summary, zoo_cells
from bench.experiments.zoo.trial import BUDGETS, STEPS, STRATEGY, try_architecture
from bench.machine.separate_process import SeparateProcessError, in_separate_process
from bench.show.tables import print_table
from bench.show.terminal import console, say
from bench.workloads.architectures.catalogue import Architecture

ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooSettings:
    """What the rows of one file share."""

    strategy: str
    budgets: tuple[str, ...]
    steps: int


SETTINGS = ZooSettings(strategy=STRATEGY, budgets=BUDGETS, steps=STEPS)


def run_zoo(
    architectures: Sequence[Architecture], doors: Sequence[Door], *, limit_s: float, workers: int, out: Path | None
) -> list[ZooRow]:
    """Try each through each door, save rows as they come, print what was served and why not; rows in order."""
    order = [(a.library.value, a.family, door) for a in architectures for door in doors]
    done = {row.key: row for row in (resumed_rows(out, ZOO, settings=SETTINGS) if out else [])}
    wanted = [(a, door) for a in architectures for door in doors if (a.library.value, a.family, door) not in done]
    with Progress(console=console, transient=True) as bar, ThreadPoolExecutor(workers) as pool:
        task = bar.add_task("architectures", total=len(wanted))
        for future in as_completed([pool.submit(_row, a, door, limit_s) for a, door in wanted]):
            row = future.result()
            done[row.key] = row
            bar.update(task, advance=1, description=f"{row.library}/{row.family}")
            say(f"{row.library}/{row.family} {row.door.value}: {row.outcome.value} {row.note[:100]}")
            if out is not None:
                save_rows(out, ZOO, sorted(done.values(), key=_place), settings=SETTINGS)
    rows = [done[key] for key in order]
    print_zoo(rows)
    return rows


def _place(row: ZooRow) -> tuple[str, str, str]:
    return row.library, row.family, row.door.value


def _row(architecture: Architecture, door: Door, limit_s: float) -> ZooRow:
    try:
        return in_separate_process(
            try_architecture, architecture, door, what=architecture.name, env=ONE_THREAD, limit_s=limit_s
        )
    except SeparateProcessError as error:
        return ZooRow(
            library=architecture.library.value,
            family=architecture.family,
            model=architecture.model,
            door=door,
            outcome=Outcome.FAILED,
            note=error.reason,
        )


def print_zoo(rows: Sequence[ZooRow]) -> None:
    """What was served, and what was not and why."""
    columns, lines = pass_rates(rows)
    caption = (
        f"Planned by {STRATEGY} at the first of {', '.join(BUDGETS)} that fits; {STEPS} training steps beside as many "
        "plain ones from the same seed: returned values, parameters, gradients, buffers, optimizer state and the "
        "generator, to the bit. One thread each."
    )
    print_table("Architectures served", columns, lines, caption=caption)
    columns, lines = reasons(rows)
    if lines:
        print_table("Not served, and why", columns, lines)


ZOO = Experiment(
    kind="zoo",
    rows=(ZooRow,),
    table=line_by_line(COLUMNS, zoo_cells),
    below=summary,
    settings=ZooSettings,
)
