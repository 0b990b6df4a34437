"""Calls in a process of their own, and why there is no answer."""

import os
import signal
from pathlib import Path

import pytest

from bench.machine.separate_process import SeparateProcessError, in_separate_process, reason_of
from planner.errors import PlannerError


def failed(call, *arguments):
    with pytest.raises(SeparateProcessError) as caught:
        in_separate_process(call, *arguments, what="the work")
    return caught.value


def loud(number):
    print("noise")
    return {"number": number, "process": os.getpid(), "said": os.environ.get("SAID")}


def advises():
    raise RuntimeError("no kernel for this\n\nSet TORCHDYNAMO_VERBOSE=1 for more information")


def ends(code):
    os._exit(code)


def ended_by(name):
    os.kill(os.getpid(), getattr(signal, name))


class Unreadable:
    """What cannot be read back there."""

    def __reduce__(self):
        return Path, (3,)


def test_the_answer_comes_from_our_bench_in_another_process_whatever_else_is_there(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text("raise SystemExit('not ours')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    answer = in_separate_process(loud, 7, what="the work", env={"SAID": "this"})
    assert (answer["number"], answer["said"]) == (7, "this")
    assert answer["process"] != os.getpid()


def test_a_process_that_fails_says_what_was_done_and_why_and_not_the_advice_below_it():
    error = failed(advises)
    assert str(error) == "the work: RuntimeError: no kernel for this"
    assert error.reason == "RuntimeError: no kernel for this"


@pytest.mark.parametrize(
    ("name", "said"),
    [("SIGKILL", "killed by SIGKILL, probably out of memory"), ("SIGTERM", "killed by SIGTERM")],
)
def test_a_process_that_a_signal_ended_names_it(name, said):
    assert failed(ended_by, name).reason == said


def test_a_process_that_ends_without_a_word_is_known_by_its_exit_code():
    assert failed(ends, 3).reason == "exit code 3"


def test_a_process_that_ends_before_its_work_is_known_by_its_last_line():
    assert failed(loud, Unreadable()).reason.startswith("TypeError: ")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("backend='aot_eager' raised:\nTypeError: bad\n\nadvice"),
         "RuntimeError: backend='aot_eager' raised: TypeError: bad"),
        (ValueError(), "ValueError"),
        (ValueError("what now:"), "ValueError: what now:"),
        (PlannerError("step.py:3: x.item()\n  reads a value"), "step.py:3: x.item() reads a value"),
    ],
)  # fmt: skip
def test_an_error_in_one_line_holds_its_reason(error, reason):
    assert reason_of(error) == reason
