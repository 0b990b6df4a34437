"""Peers measured in a process of their own, and why there is no row."""

import pytest

from bench.experiments.comparison import peers
from bench.experiments.comparison.rows import PeerRow
from bench.machine.separate_process import SeparateProcessError
from bench.workloads.peers import NotForThisModelError, hugging_face
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
