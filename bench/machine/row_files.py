"""Committed measurements: rows with the command, versions, machine and commit that made them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planner.errors import FileFormatError

PACKAGES = ("recompute-planner", "torch", "torchvision", "transformers", "ortools", "pulp", "numpy")


def save_rows(
    path: Path, *, command: str, rows: Sequence[dict[str, Any]], settings: dict[str, Any] | None = None
) -> None:
    """Write rows, where they came from, and the settings that rows to be added must share; all of it or nothing."""
    shared = {} if settings is None else {"settings": settings}
    document = {"command": command, **shared, **provenance(), "rows": list(rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")  # an interrupt must not leave half a file
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def resumed_rows(path: Path, *, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to go on from, none if there is no file; FileFormatError if they were made in another way."""
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows: list[dict[str, Any]] = document["rows"]
        there, here = _conditions(document), _conditions({**provenance(), "settings": settings})
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{path}: not a file of rows to go on from ({error!r}); delete it or use another --out"
        ) from None
    for name in dict.fromkeys((*there, *here)):
        if there.get(name) != here.get(name):
            raise FileFormatError(
                f"{path}: made with {name} {there.get(name)!r}, not {here.get(name)!r}: its rows cannot be mixed with "
                "new ones; delete it or use another --out"
            )
    return rows


def _conditions(document: dict[str, Any]) -> dict[str, Any]:
    """What all rows of a file share, as plain data; the commit may differ."""
    kept = {**document["settings"], **document["versions"], **document["machine"]}
    return dict(json.loads(json.dumps(kept)))


def command_line() -> str:
    """The command that is running, as one would type it."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])


def slug(text: str) -> str:
    """A piece of a file's name."""
    return "".join(c if c.isalnum() else "_" for c in text.replace("%", "pct"))


def provenance() -> dict[str, Any]:
    """Versions, machine and commit of this run."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": _threads(),
            "memory_gib": _memory_gib(),
            "system": platform.system(),
        },
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


def _threads() -> int | None:
    """The threads that torch computes with; None where it was not needed."""
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _memory_gib() -> float | None:
    lines = _read(Path("/proc/meminfo")).splitlines()
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemTotal")), None)
    return None if kib is None else round(kib / 2**20, 1)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _commit() -> str:
    """The commit that is checked out; "unknown" without git, or outside of a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    found = subprocess.run(
        [git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return found.stdout.strip() or "unknown"
