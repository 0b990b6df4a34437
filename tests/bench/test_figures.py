"""The numbers behind the figures; drawing itself is only checked to give a picture."""

from contextlib import contextmanager

import pytest

from bench.show import batch_figures as figures_batches
from bench.show import figures
from bench.show import pipeline_figure as pipeline
from planner.analysis import candidates
from planner.ir import Phase
from planner.plan import Plan, recompute_once
from planner.schedule import lower
from planner.simulator import simulate
from planner.synthetic import residual_tower, transformer


def test_a_memory_curve_ends_with_the_step_and_marks_every_rerun():
    graph = residual_tower(3)
    schedule = lower(graph, recompute_once(graph, candidates(graph)[:4]))
    timeline = simulate(graph, schedule)
    curve = figures.curve(graph, schedule, timeline, label="x")
    assert curve.ms[-1] * 1e3 == pytest.approx(timeline.time_us)
    assert max(curve.nbytes) == curve.peak_bytes == timeline.peak_bytes
    assert sum(end - start for start, end in curve.rerun_ms) * 1e3 == pytest.approx(timeline.recompute_us)
    assert [phase for _, phase in curve.borders] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert curve.nbytes[curve.ms.index(curve.peak_ms)] == curve.peak_bytes


def test_time_by_kind_adds_up_to_the_step():
    graph = transformer(3)
    rows = figures.time_by_kind(graph, most=3)
    assert sum(sum(us.values()) for _, us, _ in rows) == pytest.approx(graph.time_us)
    assert sum(count for _, _, count in rows) == len(graph.ops)
    assert rows[-1][0].endswith("others")


def test_the_largest_activations_come_first():
    rows = figures.largest_activations(transformer(3), most=5)
    assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)
    assert rows[0].inactive_us > 0


def test_every_figure_is_drawn(tmp_path):
    graph = residual_tower(3)
    schedule = lower(graph, Plan())
    timeline = simulate(graph, schedule)
    figures.draw_memory(tmp_path / "a.png", [figures.unplanned_curve(graph)], title="t", budget_bytes=10)
    figures.draw_memory_by_role(tmp_path / "b.png", graph, schedule, title="t")
    figures.draw_peak_breakdown(tmp_path / "c.png", timeline, title="t")
    figures.draw_largest(tmp_path / "d.png", figures.largest_activations(graph), title="t")
    figures.draw_time_by_kind(tmp_path / "e.png", figures.time_by_kind(graph), title="t")
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 5
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize(
    ("nbytes", "unit"),
    [
        (0, (1, "bytes")),
        (1023, (1, "bytes")),
        (1024, (2**10, "KiB")),
        (2**30 - 1, (2**20, "MiB")),
        (3 * 2**29, (2**30, "GiB")),
    ],
)
def test_an_axis_has_the_largest_unit_that_its_end_holds_once(nbytes, unit):
    assert figures.unit_for(nbytes) == unit


def batch_row(batch, **changed):
    roles = {"param": 10, "activation": 30}
    row = {"batch": batch, "measured": True, "status": "fits", "eager_s": 1.0, "planned_s": 1.1}
    return {**row, "by_role_eager": roles, "by_role_planned": {"param": 10, "activation": 20}, **changed}


def test_batch_figures_are_drawn_with_rows_that_have_no_plan_or_no_time(tmp_path):
    rows = [
        batch_row(4),
        batch_row(8, status="over budget", planned_s=None),
        batch_row(9, status="no plan", planned_s=None, by_role_planned={}),
        batch_row(16, measured=False, eager_s=None, planned_s=None),
    ]
    figures_batches.draw_batch_peaks(tmp_path / "peaks.png", rows, title="t")
    figures_batches.draw_batch_latency(tmp_path / "latency.png", rows, title="t")
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in tmp_path.glob("*.png"))


def sized(batch, nbytes, *, measured=True):
    return batch_row(batch, measured=measured, by_role_eager={"param": nbytes}, by_role_planned={"param": nbytes // 2})


def batches(groups):
    return [[row["batch"] for row in group] for group in groups]


def size(row):
    return row["by_role_eager"]["param"]


def test_batches_share_an_axis_as_long_as_the_smallest_can_be_seen_on_it():
    rows = [sized(4, 100), sized(8, 300), sized(16, 600, measured=False)]
    assert batches(figures_batches.panels(rows, size)) == [[4, 8, 16]]
    assert batches(figures_batches.panels(rows, lambda row: 0)) == [[4, 8, 16]]
    assert figures_batches.panels([], size) == [[]]


def test_predicted_batches_that_dwarf_the_measured_ones_have_an_axis_of_their_own():
    rows = [sized(4, 100), sized(8, 200), sized(16, 400), sized(128, 3000, measured=False)]
    assert batches(figures_batches.panels(rows, size)) == [[4, 8, 16], [128]]


def test_batches_of_one_kind_are_parted_at_the_widest_step():
    rows = [sized(4, 100), sized(8, 200), sized(64, 1500), sized(128, 3000)]
    assert batches(figures_batches.panels(rows, size)) == [[4, 8], [64, 128]]


@pytest.mark.parametrize("draw", [figures_batches.draw_batch_peaks, figures_batches.draw_batch_latency])
def test_two_panels_are_drawn_each_with_all_of_its_labels(draw, tmp_path, monkeypatch):
    drawn = []
    real = figures_batches.axes_beside

    @contextmanager
    def kept(*args, **kwargs):
        with real(*args, **kwargs) as cells:
            yield cells
            drawn.extend(cells)

    monkeypatch.setattr(figures_batches, "axes_beside", kept)
    rows = [sized(4, 100), sized(8, 200), sized(128, 3000, measured=False) | {"eager_s": 20.0, "planned_s": 22.0}]
    draw(tmp_path / "batches.png", rows, title="t")
    left, right = drawn
    assert [label.get_text() for label in left.get_xticklabels()] == ["4", "8"]
    assert [label.get_text() for label in right.get_xticklabels()] == ["128\n(predicted)"]
    assert [len(cell.texts) for cell in drawn] == [2, 1]
    assert right.get_ylim()[1] > 10 * left.get_ylim()[1] or right.get_ylabel() != left.get_ylabel()
    assert (tmp_path / "batches.png").read_bytes().startswith(b"\x89PNG")


def test_the_labels_on_planned_bars_say_the_reduction_the_ratio_or_why_there_is_none():
    assert figures_batches.reduction_label(batch_row(4)) == "\N{MINUS SIGN}25%"
    assert figures_batches.reduction_label(batch_row(4, by_role_planned={"param": 40})) == "same"
    assert figures_batches.reduction_label(batch_row(4, status="over budget")) == "over\nbudget"
    assert figures_batches.latency_label(batch_row(4)) == "1.10x"
    assert figures_batches.latency_label(batch_row(4, planned_s=None)) == "not timed"
    assert figures_batches.latency_label(batch_row(4, status="no plan")) == "no\nplan"


def test_the_pipeline_is_drawn_with_every_stage(tmp_path):
    assert [stage.title for stage in pipeline.STAGES] == ["capture", "measure", "plan", "rewrite", "prove"]
    pipeline.draw_pipeline(tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")
