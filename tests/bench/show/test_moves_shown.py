"""What is moved to the host, in the executed sequence, the life-lines and the figures."""

import pytest

from bench.show.activation_spans import lifelines, plan_text
from bench.show.dot import dot_text
from bench.show.memory_figures import curve
from bench.show.plan_figure import draw_plan
from bench.show.schedule_table import executed, sequence_text
from planner.explain import Choice
from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.placement import place
from planner.schedule import lower
from planner.simulator import simulate
from planner.synthetic import residual_tower
from tests.small import storage

LINK = HostLink.of(0.1, latency_us=1.0)


@pytest.fixture(scope="module")
def moved():
    """A tower whose first convolution is on the host for a while, and another dropped."""
    graph = residual_tower(3)
    state = Incremental(graph, [storage(graph, "b1_conv")])
    placed = place(state, [storage(graph, "b0_conv")], budget_bytes=1, link=LINK)
    schedule = lower(graph, placed.added_to(state.plan()), link=LINK)
    return graph, schedule, executed(graph, schedule)


def test_the_sequence_tells_what_goes_to_the_host_and_when_it_comes_back(moved):
    graph, _, runs = moved
    text = sequence_text(graph, runs, title="a tower")
    assert text.count("{b0_conv}") == 1
    assert text.count("+b0_conv") == 1
    assert text.index("{b0_conv}") < text.index("+b0_conv")
    assert "[b1_conv]" in text
    assert "on its way back" in text


def test_live_bytes_after_every_run_add_up_over_copies_too(moved):
    graph, schedule, runs = moved
    sizes = [s.nbytes for s in graph.storages]
    live = graph.start_bytes
    for run in runs:
        live += sum(sizes[s] for s in (*run.made, *run.brought)) - sum(sizes[s] for s in run.freed)
        assert run.after_bytes == live
    assert live == simulate(graph, schedule).bytes_at[-1]


def test_a_life_line_has_a_second_span_that_a_copy_brought(moved):
    graph, _, runs = moved
    (line,) = [line for line in lifelines(graph, runs) if line.choice is Choice.OFFLOAD]
    assert line.name == "b0_conv"
    assert [span.brought for span in line.spans] == [False, True]
    assert line.spans[0].end_ms <= line.spans[1].start_ms
    assert "1 are moved to the host: 100 B" in plan_text(lifelines(graph, runs), title="a tower")


def test_the_curve_includes_the_time_that_runs_wait(moved, tmp_path):
    graph, schedule, runs = moved
    timeline = simulate(graph, schedule)
    line = curve(graph, schedule, timeline, label="moved")
    assert line.ms[-1] == pytest.approx(timeline.time_us / 1e3)
    draw_plan(tmp_path / "plan.png", lifelines(graph, runs), line, title="a tower")
    assert (tmp_path / "plan.png").stat().st_size > 0


def test_an_op_whose_output_is_away_for_a_while_has_a_dashed_border(moved):
    graph, _, runs = moved
    dashed = [line for line in dot_text(graph, runs).splitlines() if "dashed" in line]
    assert sum("b0_conv" in line for line in dashed) == 1
