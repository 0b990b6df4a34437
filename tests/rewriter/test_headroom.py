"""Memory is never taken to its last byte: on the CPU that is a kill, not an error."""

import pytest
import torch

import profiler.measuring.memory
import rewriter.pipeline
from profiler.measuring.memory import HEADROOM, usable_bytes
from rewriter import checkpoint
from rewriter.provisional import fits_as_it_is, needed_bytes
from tests.rewriter import tiny
from tests.shared import case_of

CPU = torch.device("cpu")


def given(monkeypatch, nbytes):
    monkeypatch.setattr(profiler.measuring.memory, "available_bytes", lambda device: nbytes)


def test_a_share_of_what_is_there_stays_out_of_reach(monkeypatch):
    given(monkeypatch, 1000)
    assert usable_bytes(CPU) == int(1000 * (1 - HEADROOM)) == 850


def test_a_step_that_would_take_the_last_of_the_memory_is_not_run_as_it_is(monkeypatch):
    traced = case_of(tiny.plain).captured
    needed = needed_bytes(traced.graph, CPU)
    given(monkeypatch, int(needed / (1 - HEADROOM)) + 2)
    assert fits_as_it_is(traced)
    given(monkeypatch, int(needed / 0.95))
    assert not fits_as_it_is(traced)


def test_a_proof_for_which_there_is_no_memory_is_left_out_with_the_numbers(monkeypatch):
    monkeypatch.setattr(rewriter.pipeline, "lack_of", lambda traced, *, proven_steps: "it needs 3 GiB more on cpu")
    with pytest.warns(UserWarning, match="this plan is unproven: to run and compare both versions, it needs 3 GiB"):
        step = checkpoint(*tiny.plain(), budget="1GiB", show_progress=False)
    assert step.verification is None
    assert "unproven: to run and compare" in str(step.solution)
