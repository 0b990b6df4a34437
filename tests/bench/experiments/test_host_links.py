"""`--host-link`: the trade-off with and without a way to the host."""

import math

import pytest

from bench.__main__ import main
from bench.experiments.comparison.planned_steps import run_comparison
from bench.experiments.comparison.run import moves, remarks
from bench.experiments.host_links import label, moving
from bench.experiments.pareto.figure import draw_trade_off
from bench.experiments.pareto.run import PARETO, trade_off
from bench.experiments.registry import load
from bench.experiments.results_file import save_rows
from bench.fit.printing import with_link
from bench.workloads.spec import WorkloadSpec
from planner.errors import LinkError
from planner.host_link import HostLink
from planner.synthetic import residual_tower
from profiler.estimating.devices import DEVICES
from profiler.measuring.hosts import FileHost
from rewriter.moving import HostAccess

FAST = HostLink.of(10.0, latency_us=0.0)


@pytest.fixture(scope="module")
def found():
    return trade_off(residual_tower(5), ["sqrtn", "mutwo", "ilp"], ["80%", "50%"], time_limit_s=3, links=[FAST])


def test_strategies_that_use_a_link_have_a_line_with_it_beside_the_one_without(found):
    assert found.strategies == ["sqrtn", "mutwo", "ilp", label("mutwo", FAST), label("ilp", FAST)]
    assert moving(["keep_all", "sqrtn:segments=3", "cheap", "auto", "a.py:B"]) == ["auto", "a.py:B"]
    for name in ("mutwo", "ilp"):
        for without, with_link_ in zip(found.of(name), found.of(label(name, FAST)), strict=True):
            assert with_link_.overhead <= (math.inf if without.overhead is None else without.overhead)
            assert with_link_.bound is None or with_link_.bound <= with_link_.overhead


def test_the_figure_has_both_and_rows_come_back_from_their_file(found, tmp_path):
    draw_trade_off(tmp_path / "curve.png", found)
    assert (tmp_path / "curve.png").stat().st_size > 0
    save_rows(tmp_path / "rows.json", PARETO, found.rows)
    _, results = load(tmp_path / "rows.json")
    assert tuple(results.rows) == found.rows


def test_graphs_are_compared_with_and_without(capsys):
    assert main(["--synthetic", "tower", "--strategy", "mutwo", "--budget", "60%", "--host-link", "0.001,10"]) == 0
    assert capsys.readouterr().out.count("mutwo + host") == 2


@pytest.mark.parametrize("command", [[], ["pareto"], ["plans"]])
@pytest.mark.parametrize("text", ["0", "-1", "soon", "24/0"])
def test_a_link_that_cannot_be_is_one_line(command, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    graph = [] if command == ["plans"] else ["--synthetic", "tower"]
    assert main([*command, *graph, f"--host-link={text}"]) == 2
    assert "host link" in capsys.readouterr().err


def test_a_device_may_be_asked_about_with_another_link_or_with_none():
    device = DEVICES["A100-40"]
    assert with_link(device, None) is device
    assert with_link(device, "0").host_link is None
    assert with_link(device, "12").host_link == HostLink.of(12)
    with pytest.raises(LinkError, match="such as 24"):
        with_link(device, "fast")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--offload-dir", "."], "--offload-dir without --host-link"),
        (["--host-link", "12,24"], "--host-link takes one here"),
        (["--host-link", "24", "--offload-dir", "missing"], "there is no such folder"),
        (["--host-link", "24", "--batches", "2,4"], "--host-link contradict each other"),
    ],
)
def test_a_model_takes_one_link_and_a_folder_that_is_there(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "resnet18", "--strategy", "mutwo", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_a_planned_model_moves_is_run_proven_and_told(tmp_path):
    access = HostAccess(host=FileHost(tmp_path), link=HostLink.of(1000.0, latency_us=0.0))
    spec = WorkloadSpec(source="tests.bench.small:make", batch=64)
    found = run_comparison(spec, ["mutwo", "cheap"], ["60%"], pairs=1, time_limit_s=2, access=access)
    assert [row.strategy for row in found.rows] == ["mutwo", "cheap", "mutwo + host at 1e+03 GB/s"]
    row = found.rows[2]
    assert row.exact
    assert row.moved_bytes > 0
    assert row.measured_stall_s >= 0
    assert moves(row).startswith("moves ")
    assert any("ms measured" in line for line in remarks(found))
    assert list(tmp_path.iterdir()) == []
