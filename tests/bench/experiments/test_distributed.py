"""Rows of training on several processes: how they become lines, and that a small model gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bench.__main__ import main
from bench.experiments.distributed import worker
from bench.experiments.distributed.rows import DistributedRow, table
from profiler.workload import Workload
from tests.ranks import assert_predicted, on_ranks

ROW = DistributedRow(
    model="net", way="DDP", budget="", ranks=2, rank=0, peak_bytes=2048, step_s=0.010, exact=None, prediction_error=None
)


def test_a_line_has_the_peaks_of_all_ranks_and_the_slowest_ones_time_to_eager() -> None:
    planned = replace(ROW, way="DDP planned", budget="70%", peak_bytes=1024, exact=True, prediction_error=-0.002)
    rows = [
        ROW, replace(ROW, rank=1, step_s=0.020),
        replace(planned, step_s=0.022), replace(planned, rank=1, step_s=0.011, peak_bytes=1536),
    ]  # fmt: skip
    _, lines = table(rows)
    assert lines[0] == ("net", "DDP", "-", "2.0 KiB, 2.0 KiB", "20.0 ms", "1.00x", "-", "-")
    assert lines[1] == ("net", "DDP planned", "70%", "1.0 KiB, 1.5 KiB", "22.0 ms", "1.10x", "yes", "0.20%")


def test_what_differs_and_what_is_refused_is_told() -> None:
    _, lines = table([replace(ROW, way="DDP planned", exact=False), replace(ROW, way="FSDP2", refused="no plan fits")])
    assert "NO" in lines[0]
    assert "refused: no plan fits" in lines[1]


def _tiny(batch_size: int, *, optimizer: Any, seed: int = 0) -> Workload:
    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.GELU()) for _ in range(3)))
    return Workload(step, model, optimizer(list(model.parameters())), torch.randn(batch_size, 12))


def _measured(rank: int) -> list[DistributedRow]:
    worker.ZOO["tiny"] = _tiny
    worker.MODELS["tiny"] = (128, "sgd", {})
    return worker.measured("tiny", rank, ["70%"], pairs=1)


def test_a_small_model_is_measured_in_every_way() -> None:
    for rows in on_ranks(_measured):
        ways = [row.way for row in rows]
        assert ways == ["DDP", "DDP planned", "FSDP2", "FSDP2 + torch.utils.checkpoint", "FSDP2 planned"]
        assert all(row.peak_bytes > 0 and row.step_s > 0 for row in rows)
        planned = [row for row in rows if row.way.endswith("planned")]
        for row in planned:
            assert row.exact
            assert_predicted(row.prediction_error)
        assert planned[1].peak_bytes < rows[2].peak_bytes


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distributed", "--model", "alexnet"]) == 2
    assert "there are resnet18, bert" in capsys.readouterr().err
