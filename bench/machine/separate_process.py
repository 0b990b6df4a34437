"""A call in a process of its own: where one measurement would disturb the next.

This module is the program of that process too: `python -m bench.machine.separate_process CALL ANSWER`, two files.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from planner.errors import PlannerError

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


class SeparateProcessError(PlannerError):
    """The process failed; the message is what was done there, and `reason` why there is no answer."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.reason = reason


def in_separate_process(
    call: Callable[..., T],
    *arguments: object,
    what: str,
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> T:
    """`call(*arguments)` of a module's function in a process of its own; `env` is added to ours.

    SeparateProcessError where it fails, is killed, or takes longer than `limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "call", Path(folder) / "answer"
        asked.write_bytes(pickle.dumps((call, arguments)))
        # Not what lies in the folder the user stands in: a `bench` of their own would be found first.
        command = [sys.executable, "-P", "-m", __name__, str(asked), str(answered)]
        ours = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        added = {"PYTHONPATH": ours, **(env or {})}
        surroundings = {**os.environ, **added}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=surroundings, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            raise SeparateProcessError(what, f"not done after {limit_s:.0f} s") from None
        if not answered.exists():
            raise SeparateProcessError(what, _why_it_died(done.returncode, done.stderr))
        result, reason = pickle.loads(answered.read_bytes())
    if reason:
        raise SeparateProcessError(what, reason)
    answer: T = result
    return answer


def _answer(asked: Path, answered: Path) -> None:
    """What the process does: the call, and its result or the error that there is instead."""
    result: Any = None
    reason = ""
    call, arguments = pickle.loads(asked.read_bytes())
    try:
        result = call(*arguments)
    except Exception as error:
        traceback.print_exc()  # for who runs the module by hand
        reason = reason_of(error)
    answered.write_bytes(pickle.dumps((result, reason)))


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


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))
