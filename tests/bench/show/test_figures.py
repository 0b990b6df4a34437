"""The numbers behind the figures; drawing itself is only checked to give a picture."""

import pytest

from bench.show import memory_figures, step_figures
from bench.show import pipeline_figure as pipeline
from bench.show.axes import unit_for
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
    curve = memory_figures.curve(graph, schedule, timeline, label="x")
    assert curve.ms[-1] * 1e3 == pytest.approx(timeline.time_us)
    assert max(curve.nbytes) == curve.peak_bytes == timeline.peak_bytes
    assert sum(end - start for start, end in curve.rerun_ms) * 1e3 == pytest.approx(timeline.recompute_us)
    assert [phase for _, phase in curve.borders] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert curve.nbytes[curve.ms.index(curve.peak_ms)] == curve.peak_bytes


def test_time_by_kind_adds_up_to_the_step():
    graph = transformer(3)
    rows = step_figures.time_by_kind(graph, most=3)
    assert sum(sum(us.values()) for _, us, _ in rows) == pytest.approx(graph.time_us)
    assert sum(count for _, _, count in rows) == len(graph.ops)
    assert rows[-1][0].endswith("others")


def test_the_largest_activations_come_first():
    rows = step_figures.largest_activations(transformer(3), most=5)
    assert [row.nbytes for row in rows] == sorted((row.nbytes for row in rows), reverse=True)
    assert rows[0].inactive_us > 0


def test_every_figure_is_drawn(tmp_path):
    graph = residual_tower(3)
    schedule = lower(graph, Plan())
    timeline = simulate(graph, schedule)
    memory_figures.draw_memory(tmp_path / "a.png", [memory_figures.unplanned_curve(graph)], title="t", budget_bytes=10)
    memory_figures.draw_memory_by_role(tmp_path / "b.png", graph, schedule, title="t")
    step_figures.draw_peak_breakdown(tmp_path / "c.png", timeline, title="t")
    step_figures.draw_largest(tmp_path / "d.png", step_figures.largest_activations(graph), title="t")
    step_figures.draw_time_by_kind(tmp_path / "e.png", step_figures.time_by_kind(graph), title="t")
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
    assert unit_for(nbytes) == unit


def test_the_pipeline_is_drawn_with_every_stage(tmp_path):
    assert [stage.title for stage in pipeline.STAGES] == ["capture", "measure", "plan", "rewrite", "prove"]
    pipeline.draw_pipeline(tmp_path / "pipeline.png")
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG")
