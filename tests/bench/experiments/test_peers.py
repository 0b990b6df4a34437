"""Peers measured in a process of their own, and why there is no row."""

import pytest
import torch
from torch import nn

from bench.experiments.comparison import peers
from bench.experiments.comparison.rows import PeerRow
from bench.machine.separate_process import SeparateProcessError
from bench.workloads.peers import PEERS, NotForThisModelError, hugging_face, is_ours, peer_named, peer_names
from bench.workloads.spec import WorkloadSpec
from tests.bench import small

SPEC = WorkloadSpec(source="tests.bench.small:make_blocks", batch=2)


def test_a_peer_gives_a_row_from_a_process_of_its_own():
    (row,) = peers.peer_rows(SPEC, ["torch.utils.checkpoint, every block"], pairs=1)
    assert (row.model, row.error) == (SPEC.title, "")
    assert row.peak_ratio > 0
    assert row.exact is False  # batch norm statistics are updated twice


def test_a_peer_that_does_not_apply_is_a_row_that_says_why(monkeypatch):
    with pytest.raises(NotForThisModelError, match="Sequential is not a transformers model") as caught:
        hugging_face(small.network())

    def fails(*_, what):
        raise SeparateProcessError(what, str(caught.value))

    monkeypatch.setattr(peers, "in_separate_process", fails)
    (row,) = peers.peer_rows(SPEC, ["Hugging Face gradient checkpointing"], pairs=1)
    assert row == PeerRow(model=SPEC.title, peer="Hugging Face gradient checkpointing", error=str(caught.value))


def test_a_planned_model_is_a_row_that_says_its_way_and_promise():
    row = peers.measure_peer(WorkloadSpec(source="tests.bench.small:make", batch=8), "planned model, budget 85%", 1)
    assert (row.error, row.exact) == ("", True)
    assert 0 < row.peak_ratio < 1
    assert row.promise.startswith("own capture, fits: eager's bits")


def test_what_a_peer_does_at_first_is_over_before_it_is_measured(monkeypatch):
    calls = []

    class Slow(nn.Module):
        """Does something else in its first steps, as a compiler does."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            calls.append(torch.autograd._profiler_enabled())
            return self.inner(x)

    monkeypatch.setitem(PEERS, "slow", Slow)
    row = peers.measure_peer(SPEC, "slow", 2)
    assert row.exact
    assert len(calls) == peers.FIRST_STEPS + peers.PROVEN_STEPS + 2
    assert calls.index(True) == peers.FIRST_STEPS + peers.PROVEN_STEPS - 1, "the step whose memory is watched"


def test_every_peer_of_a_list_is_found_by_its_name():
    names = peer_names(["60%", "4GiB"])
    assert len(set(names)) == len(names)
    assert {"planned model, budget 4GiB", "inductor", "inductor, memory budget 0.5"} <= set(names)
    assert all(callable(peer_named(name)) for name in names)
    assert [name for name in names if is_ours(name)][:2] == ["planned model, budget 60%", "planned model, budget 4GiB"]
