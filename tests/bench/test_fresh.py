"""Rows measured in a process of their own."""

import pytest

from bench.fresh import FreshProcessError, row_of
from bench.peers import peer_rows
from bench.workloads import WorkloadSpec

SMALL = WorkloadSpec(model="resnet18", batch=2, image=32)


def test_a_process_that_fails_says_what_was_measured_and_its_last_line():
    with pytest.raises(FreshProcessError, match=r"resnet18 b2 32px: .*no such peer"):
        row_of("bench.peers", SMALL, "no such peer", 1)


def test_a_peer_gives_a_row_and_one_that_does_not_apply_a_reason():
    names = ["torch.utils.checkpoint, every block", "Hugging Face gradient checkpointing"]
    done, failed = peer_rows(SMALL, names, pairs=1)
    assert done["peak_ratio"] > 0
    assert done["exact"] is False  # batch norm statistics are updated twice
    assert failed == {"model": SMALL.title, "peer": names[1], "error": "ResNet is not a transformers model"}
