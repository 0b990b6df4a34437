"""Where measurements come from: the command, versions, machine and commit of this run."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("recompute-planner", "torch", "torchvision", "transformers", "ortools", "pulp", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run was made on; None for what it does not tell."""

    cpu: str
    cores: int | None
    threads: int | None = None
    memory_gib: float | None
    system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The command, the versions of what it used, the machine and the commit."""

    command: str
    versions: dict[str, str]
    machine: Machine
    commit: str


def provenance() -> Provenance:
    """That of this run."""
    return Provenance(
        command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        machine=Machine(
            cpu=_cpu(),
            cores=os.cpu_count(),
            threads=_threads(),
            memory_gib=_memory_gib(),
            system=platform.system(),
        ),
        commit=_commit(),
    )


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
