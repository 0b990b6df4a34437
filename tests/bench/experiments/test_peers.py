"""Peers measured in a process of their own, and why there is no row."""

from bench.experiments.comparison.peers import peer_rows
from bench.experiments.comparison.rows import PeerRow
from bench.workloads.spec import WorkloadSpec

SMALL = WorkloadSpec(model="resnet18", batch=2, image=32)


def test_a_peer_gives_a_row_and_one_that_does_not_apply_a_reason():
    names = ["torch.utils.checkpoint, every block", "Hugging Face gradient checkpointing"]
    done, failed = peer_rows(SMALL, names, pairs=1)
    assert done.peak_ratio > 0
    assert done.exact is False  # batch norm statistics are updated twice
    assert failed == PeerRow(model=SMALL.title, peer=names[1], error="ResNet is not a transformers model")
