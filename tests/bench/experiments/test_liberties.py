"""Freed gradients and early updates on the command line: said in rows and titles, exact, and less memory."""

from dataclasses import replace

import pytest

from bench.__main__ import main
from bench.experiments.comparison.planned_steps import run_comparison
from bench.workloads.spec import WorkloadSpec

SMALL = ["--import", "tests.bench.small:make", "--batch", "2", "--strategy", "mutwo"]
BOTH = ["--free-gradients", "--early-updates"]


@pytest.fixture(scope="module")
def rows():
    """One row of a plain comparison and one with both liberties, of a batch so small that gradients are most of it."""
    plain = WorkloadSpec(source="tests.bench.small:make", batch=1)
    both = replace(plain, free_gradients=True, early_updates=True)
    return [run_comparison(spec, ["mutwo"], ["100%"], pairs=1, time_limit_s=5.0).rows[0] for spec in (plain, both)]


def test_a_row_says_which_liberties_were_taken(rows):
    plain, both = rows
    assert (plain.free_gradients, plain.early_updates) == (False, False)
    assert (both.free_gradients, both.early_updates) == (True, True)
    assert both.model == "tests.bench.small:make b1 with freed gradients and early updates"


def test_liberties_take_gradients_out_of_the_peak_and_change_no_bit(rows):
    plain, both = rows
    assert plain.exact is True
    assert both.exact is True
    assert both.measured_peak_bytes < plain.measured_peak_bytes
    assert both.eager_peak_bytes == plain.eager_peak_bytes


def test_verify_passes_liberties_through(capsys):
    assert main(["verify", *SMALL, *BOTH, "--budget", "80%", "--steps", "2"]) == 0
    assert "equal to the bit" in " ".join(capsys.readouterr().out.split())


def test_specs_that_differ_in_liberties_or_dtype_keep_their_sweeps_in_different_files():
    plain = WorkloadSpec(model="resnet18")
    others = [WorkloadSpec(model="resnet18", **{name: True}) for name in ("free_gradients", "early_updates")]
    others.append(WorkloadSpec(model="resnet18", dtype="bfloat16"))
    assert len({spec.title_of_all_batches for spec in (plain, *others)}) == 4
    assert others[0].plain == plain
