"""The matrix of what was proven exact."""

import pytest
import torch

from bench.experiments import exactness
from bench.experiments.exactness import PLANNED_MODEL, TO_FILES, ExactnessRow, matrix, run_exactness
from bench.experiments.registry import load
from profiler.workload import Workload
from tests.bench.small import make


def test_a_matrix_has_a_line_per_model_and_optimizer_and_a_column_per_strategy():
    rows = [
        ExactnessRow(
            model="m", optimizer="sgd", strategy=strategy, steps=3, exact=strategy == "a", first_mismatch="w",
            compared={"gradients": 2}, dropped_share=0.5, reruns=1, prediction_error=0.0,
        )
        for strategy in ("a", "b")
    ]  # fmt: skip
    columns, lines = matrix(rows)
    assert columns == ("model", "optimizer", "a", "b")
    assert lines == [("m", "sgd", "exact, 50% dropped", "DIFFERS: w, 50% dropped")]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(exactness, "MODELS", {"small": (64, {})})
    monkeypatch.setattr(exactness, "OPTIMIZER_NAMES", ("sgd",))
    monkeypatch.setattr(exactness, "MODEL_BUDGETS", ("75%",))
    monkeypatch.setattr(exactness, "ZOO", {"small": lambda batch, optimizer: Workload(*make(batch))})


@pytest.mark.usefixtures("small")
def test_files_and_the_model_door_are_columns_beside_the_strategies(tmp_path):
    assert run_exactness(["mutwo"], steps=4, out=tmp_path / "rows.json")
    rows = load(tmp_path / "rows.json")[1].rows
    assert [row.strategy for row in rows] == ["mutwo", TO_FILES, PLANNED_MODEL]
    assert all(row.exact and row.dropped_share > 0 and abs(row.prediction_error) < 0.01 for row in rows)
    assert [row.reruns > 0 for row in rows] == [True, False, True]


@pytest.mark.usefixtures("small")
def test_a_planned_model_that_trains_otherwise_is_no_exact_one(monkeypatch):
    honest = exactness.checkpoint_model

    def cheats(model, **options):
        with torch.no_grad():
            next(model.parameters()).add_(1e-7)
        return honest(model, **options)

    monkeypatch.setattr(exactness, "checkpoint_model", cheats)
    assert not run_exactness([], steps=3, out=None)
