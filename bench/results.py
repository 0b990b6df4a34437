"""Committed measurements: rows with the command, versions, machine and commit that made them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "transformers", "ortools", "pulp", "numpy")


def save_rows(path: Path, *, command: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows and where they came from."""
    document = {"command": command, **provenance(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `save_rows` wrote."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def provenance() -> dict[str, Any]:
    """Versions, machine and commit of this run."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "memory_gib": _memory_gib(), "system": platform.system()},
        "commit": _commit(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory_gib() -> float | None:
    lines = _read(Path("/proc/meminfo")).splitlines()
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemTotal")), None)
    return None if kib is None else round(kib / 2**20, 1)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip() or "unknown"
