"""What C code prints is silenced, while it is asked to be, and only that."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = platform.libc_ver()[0] != "glibc"  # where C's own pointer cannot be swapped, nothing is silenced

SCRIPT = textwrap.dedent(
    """
    import ctypes
    from strategies.ilp.silence import quiet_stdout

    libc = ctypes.CDLL(None)

    def say(text):
        libc.printf(f"C {text}\\n".encode())
        libc.fflush(None)
        print(f"Python {text}", flush=True)

    say("before")
    with quiet_stdout():
        say("inside")
        with quiet_stdout():
            say("further inside")
        say("inside again")
    try:
        with quiet_stdout():
            raise KeyError
    except KeyError:
        say("after")
    """
)


def test_c_is_silent_inside_and_python_is_heard_throughout():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, check=True)
    said = ["before", "inside", "further inside", "inside again", "after"]
    heard = said if ELSEWHERE else ["before", "after"]
    assert [line for line in done.stdout.splitlines() if line[0] == "P"] == [f"Python {text}" for text in said]
    assert [line for line in done.stdout.splitlines() if line[0] == "C"] == [f"C {text}" for text in heard]
