"""The figures of a sweep: which batches share an axis, and what is written on the bars."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench.experiments.sweep import figures
from bench.experiments.sweep.rows import SweepRow
from planner.solve import Status


def batch_row(batch, **changed):
    row = {
        "model": f"m b{batch}", "batch": batch, "free_gradients": False, "early_updates": False, "strategy": "mutwo",
        "status": Status.FITS, "budget_bytes": 35, "smallest_peak_bytes": 30, "start_bytes": 10,
        "by_role_eager": {"param": 10, "activation": 30}, "by_role_planned": {"param": 10, "activation": 20},
        "predicted_overhead": 0.1, "measured": True, "why_predicted": "", "note": "", "exact": True, "eager_s": 1.0,
        "planned_s": 1.1, "eager_peak_bytes": 40, "planned_peak_bytes": 30,
    }  # fmt: skip
    return SweepRow(**row | changed)


def test_batch_figures_are_drawn_with_rows_that_have_no_plan_or_no_time(tmp_path):
    rows = [
        batch_row(4),
        batch_row(8, status=Status.OVER_BUDGET, planned_s=None),
        batch_row(9, status=Status.NO_PLAN, planned_s=None, by_role_planned={}),
        batch_row(16, measured=False, eager_s=None, planned_s=None),
    ]
    figures.draw_batch_peaks(tmp_path / "peaks.png", rows, title="t")
    figures.draw_batch_latency(tmp_path / "latency.png", rows, title="t")
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in tmp_path.glob("*.png"))


def sized(batch, nbytes, *, measured=True):
    return batch_row(batch, measured=measured, by_role_eager={"param": nbytes}, by_role_planned={"param": nbytes // 2})


def batches(groups):
    return [[row.batch for row in group] for group in groups]


def size(row):
    return row.by_role_eager["param"]


def test_batches_share_an_axis_as_long_as_the_smallest_can_be_seen_on_it():
    rows = [sized(4, 100), sized(8, 300), sized(16, 600, measured=False)]
    assert batches(figures.panels(rows, size)) == [[4, 8, 16]]
    assert batches(figures.panels(rows, lambda row: 0)) == [[4, 8, 16]]
    assert figures.panels([], size) == [[]]


def test_predicted_batches_that_dwarf_the_measured_ones_have_an_axis_of_their_own():
    rows = [sized(4, 100), sized(8, 200), sized(16, 400), sized(128, 3000, measured=False)]
    assert batches(figures.panels(rows, size)) == [[4, 8, 16], [128]]


def test_batches_of_one_kind_are_parted_at_the_widest_step():
    rows = [sized(4, 100), sized(8, 200), sized(64, 1500), sized(128, 3000)]
    assert batches(figures.panels(rows, size)) == [[4, 8], [64, 128]]


@pytest.mark.parametrize("draw", [figures.draw_batch_peaks, figures.draw_batch_latency])
def test_two_panels_are_drawn_each_with_all_of_its_labels(draw, tmp_path, monkeypatch):
    drawn = []
    real = figures.axes_beside

    @contextmanager
    def kept(*args, **kwargs):
        with real(*args, **kwargs) as cells:
            yield cells
            drawn.extend(cells)

    monkeypatch.setattr(figures, "axes_beside", kept)
    rows = [sized(4, 100), sized(8, 200), replace(sized(128, 3000, measured=False), eager_s=20.0, planned_s=22.0)]
    draw(tmp_path / "batches.png", rows, title="t")
    left, right = drawn
    assert [label.get_text() for label in left.get_xticklabels()] == ["4", "8"]
    assert [label.get_text() for label in right.get_xticklabels()] == ["128\n(predicted)"]
    assert [len(cell.texts) for cell in drawn] == [2, 1]
    assert right.get_ylim()[1] > 10 * left.get_ylim()[1] or right.get_ylabel() != left.get_ylabel()
    assert (tmp_path / "batches.png").read_bytes().startswith(b"\x89PNG")


def test_the_labels_on_planned_bars_say_the_reduction_the_ratio_or_why_there_is_none():
    assert figures.reduction_label(batch_row(4)) == "\N{MINUS SIGN}25%"
    assert figures.reduction_label(batch_row(4, by_role_planned={"param": 40})) == "same"
    assert figures.reduction_label(batch_row(4, status=Status.OVER_BUDGET)) == "over\nbudget"
    assert figures.latency_label(batch_row(4)) == "1.10x"
    assert figures.latency_label(batch_row(4, planned_s=None)) == "not timed"
    assert figures.latency_label(batch_row(4, status=Status.NO_PLAN)) == "no\nplan"
