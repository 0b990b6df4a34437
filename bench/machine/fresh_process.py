"""A row measured in a process of its own: where one model, or one peer, would disturb the next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError

ROOT = Path(__file__).parents[2]


class FreshProcessError(PlannerError):
    """The process failed; the message is what was measured, and `reason` why there is no row."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason


def row_of(module: str, spec: WorkloadSpec, *arguments: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The row that `python -m module SPEC ARGUMENTS` gives by `give_row`; `env` is added to ours."""
    # Not what lies in the folder the user stands in: a `bench` of their own would be found first.
    command = [sys.executable, "-P", "-m", module, json.dumps(asdict(spec)), *map(str, arguments)]
    ours = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    added = {"PYTHONPATH": ours, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **added}, check=False)
    if done.returncode:
        raise FreshProcessError(spec.title, _why_it_died(done.returncode, done.stderr))
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if row.get("error"):
        raise FreshProcessError(spec.title, row["error"])
    return row


def give_row(measure: Callable[[], dict[str, Any]]) -> None:
    """What such a module does as a program: its last line is the row as JSON, or the error that there is instead."""
    try:
        row = measure()
    except Exception as error:
        traceback.print_exc()  # for who runs the module by hand
        row = {"error": reason_of(error)}
    print(json.dumps(row))


def reason_of(error: Exception) -> str:
    """An error in one line: its type and what it says first. One made on purpose speaks for itself, and in full."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, PlannerError):
        return " ".join(lines)
    # "backend='aot_eager' raised:" is no reason without the line below it.
    ends = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines))
    said = " ".join(lines[: ends + 1])
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _why_it_died(code: int, stderr: str) -> str:
    """A process that a signal ended has said nothing; one that failed before its work has said so last."""
    if code < 0:
        name = {s.value: s.name for s in signal.Signals}.get(-code, f"signal {-code}")
        return f"killed by {name}" + (", probably out of memory" if -code == signal.SIGKILL else "")
    return (stderr.strip().splitlines() or [f"exit code {code}"])[-1]
