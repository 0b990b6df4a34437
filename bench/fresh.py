"""A row measured in a process of its own: where one model, or one peer, would disturb the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.workloads import WorkloadSpec
from planner.errors import PlannerError


class FreshProcessError(PlannerError):
    """The process failed; the message is what was measured and the last line it wrote."""


def row_of(module: str, spec: WorkloadSpec, *arguments: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `python -m module SPEC ARGUMENTS`, which prints one row as JSON in its last line; `env` is added to ours."""
    command = [sys.executable, "-m", module, json.dumps(asdict(spec)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})}, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise FreshProcessError(f"{spec.title}: {said[-1]}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row
