"""Rows measured in a process of their own, and why there is none."""

import sys

import pytest

from bench.experiments.peers import peer_rows
from bench.machine.fresh_process import FreshProcessError, reason_of, row_of
from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError

SMALL = WorkloadSpec(model="resnet18", batch=2, image=32)


def program(folder, body):
    """`row_of` of a module that does `body` as a program."""
    (folder / "measured_here.py").write_text(f"{body}\n", encoding="utf-8")
    return row_of("measured_here", SMALL, env={"PYTHONPATH": f"{folder}:{':'.join(filter(None, sys.path))}"})


def test_a_process_that_fails_says_what_was_measured_and_why_and_runs_our_bench_beside_another(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text("raise SystemExit('not ours')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FreshProcessError, match=r"^resnet18 b2 32px: KeyError: 'no such peer'$"):
        row_of("bench.experiments.peers", SMALL, "no such peer", 1)


def test_a_peer_gives_a_row_and_one_that_does_not_apply_a_reason():
    names = ["torch.utils.checkpoint, every block", "Hugging Face gradient checkpointing"]
    done, failed = peer_rows(SMALL, names, pairs=1)
    assert done["peak_ratio"] > 0
    assert done["exact"] is False  # batch norm statistics are updated twice
    assert failed == {"model": SMALL.title, "peer": names[1], "error": "ResNet is not a transformers model"}


def test_a_row_is_the_last_line_whatever_else_is_printed(tmp_path):
    body = "from bench.machine.fresh_process import give_row\nprint('noise')\ngive_row(lambda: {'error': '', 'a': 1})"
    assert program(tmp_path, body) == {"error": "", "a": 1}


def test_the_reason_is_the_error_and_not_the_advice_below_it(tmp_path):
    body = (
        "from bench.machine.fresh_process import give_row\n"
        "def measure():\n"
        "    raise RuntimeError('no kernel for this\\n\\nSet TORCHDYNAMO_VERBOSE=1 for more information')\n"
        "give_row(measure)"
    )
    with pytest.raises(FreshProcessError) as caught:
        program(tmp_path, body)
    assert caught.value.reason == "RuntimeError: no kernel for this"


@pytest.mark.parametrize(
    ("name", "said"),
    [("SIGKILL", "killed by SIGKILL, probably out of memory"), ("SIGTERM", "killed by SIGTERM")],
)
def test_a_process_that_a_signal_ended_names_it(tmp_path, name, said):
    with pytest.raises(FreshProcessError) as caught:
        program(tmp_path, f"import os, signal\nos.kill(os.getpid(), signal.{name})")
    assert caught.value.reason == said


def test_a_process_that_ends_before_its_work_is_known_by_its_last_line(tmp_path):
    with pytest.raises(FreshProcessError) as caught:
        program(tmp_path, "import no_such_module_anywhere")
    assert caught.value.reason == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"


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
