"""Planned steps and peers in one table: order, words, and what a failed one says."""

from pathlib import Path
from typing import Any

import pytest

from bench.commands.results import make_tables
from bench.experiments.comparison.rows import PeerRow, PlannedRow
from bench.experiments.comparison.side_by_side import (
    COLUMNS,
    COMPARISON,
    contender_cells,
    contenders,
    draw_contenders,
)
from bench.experiments.registry import load
from bench.experiments.results_file import save_rows
from planner.solve import Status


def planned(**changes: Any) -> PlannedRow:
    row = {
        "model": "resnet18 b2", "free_gradients": False, "early_updates": False, "strategy": "ilp", "budget": "50%",
        "status": Status.FITS, "budget_bytes": 70, "start_bytes": 20, "eager_peak_bytes": 120,
        "predicted_peak_bytes": 70, "measured_peak_bytes": 70, "predicted_overhead": 0.1, "measured_ratio": 1.1,
        "ratio_low": 1.05, "ratio_high": 1.15, "eager_s": 2.0, "dropped": 3, "reruns": 4, "gap": 0.01, "plan_s": 1.0,
        "apply_s": 0.4, "exact": True, "note": "", "step_share": 0.5, "prediction_error": 0.0,
        "cpu_ratio": 1.12,
    }  # fmt: skip
    return PlannedRow(**row | changes)


def peer(**changes: Any) -> PeerRow:
    row = {
        "model": "resnet18 b2", "peer": "selective checkpointing, products saved", "error": "", "peak_ratio": 0.6,
        "time_ratio": 1.3, "time_low": 1.2, "time_high": 1.4, "exact": False, "first_mismatch": "bn1.running_mean",
    }  # fmt: skip
    return PeerRow(**row | changes)


FAILED = PeerRow(model="resnet18 b2", peer="Hugging Face gradient checkpointing", error="not a transformers model")


def test_the_smallest_peak_comes_first_and_what_failed_comes_last() -> None:
    rows = [FAILED, peer(), planned(), planned(budget="70%", step_share=0.7)]
    assert [c.peak_ratio for c in contenders(rows)] == [0.5, 0.6, 0.7, None]


def test_cells_say_whose_it_is_whether_it_is_exact_and_why_it_failed() -> None:
    ours, other, failed = (contender_cells(c) for c in contenders([planned(early_updates=True), peer(), FAILED]))
    assert ours[0] == "**ilp, budget 50%, early updates**"
    assert ours[COLUMNS.index("every bit equal")] == "yes"
    assert (other[COLUMNS.index("every bit equal")], other[-1]) == ("NO", "bn1.running_mean")
    assert (failed[1], failed[-1]) == ("-", "not a transformers model")


def test_a_planned_model_is_ours_and_says_what_it_promises() -> None:
    promise = "own capture, fits: eager's bits"
    row = peer(peer="planned model, budget 60%", exact=True, first_mismatch="", promise=promise)
    (cells,) = (contender_cells(c) for c in contenders([row]))
    assert cells[0] == "**planned model, budget 60%**"
    assert cells[-1] == promise


def test_a_plan_that_does_not_fit_says_why() -> None:
    (row,) = contenders([planned(step_share=None, measured_ratio=None, ratio_low=None, exact=None, note="12 over")])
    assert contender_cells(row)[-1] == "12 over"


def test_a_comparison_saved_under_results_becomes_a_page_and_a_figure(tmp_path: Path) -> None:
    save_rows(tmp_path / "small.json", COMPARISON, [planned(), peer(), FAILED])
    assert load(tmp_path / "small.json")[1].rows == [planned(), peer(), FAILED]
    page, figure = make_tables(tmp_path)
    assert "| **ilp, budget 50%** | 0.50 | 1.10x | 1.05-1.15 | 1.12x | yes |" in page.read_text(encoding="utf-8")
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("exact", [True, False])
def test_the_figure_draws_either_verdict(tmp_path: Path, exact: bool) -> None:
    draw_contenders(tmp_path / "f.png", contenders([planned(), peer(exact=exact)]), title="t")
    assert (tmp_path / "f.png").stat().st_size > 1000
