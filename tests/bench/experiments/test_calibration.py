"""The report on estimates: its statistics by hand, and the whole of it on a tiny model. Nothing timed is asserted."""

import json

import pytest
import torch

from bench.__main__ import main
from bench.commands.results import make_tables
from bench.experiments.calibration import run as calibration
from bench.experiments.calibration.agreement import Point, by_kind, median_factor, ranks, spearman, sums_of
from bench.experiments.calibration.figure import draw_points
from bench.experiments.calibration.rows import CalibrationRow, JudgedPlan, PlanPair, plan_cells, summary
from planner.ir import Timing, TimingKind
from planner.synthetic import residual_tower
from profiler.estimating.calibration import Sizes, calibrated_cpu
from profiler.estimating.kinds import OpKind

TINY = Sizes(
    matrix=32, elements=4096, fewer_elements=1024, batch=2, image=12, channels=4, tokens=8, width=16,
    vocabulary=64, repeats=2,
)  # fmt: skip


# -- statistics -------------------------------------------------------------------------------------------------------


def test_equal_values_share_the_mean_of_their_ranks():
    assert ranks([30.0, 10.0, 20.0, 20.0]) == [4.0, 1.0, 2.5, 2.5]
    assert ranks([5.0, 5.0, 5.0]) == [2.0, 2.0, 2.0]
    assert ranks([]) == []


def test_rank_correlation_by_hand():
    assert spearman([1, 2, 3, 4], [10, 100, 1000, 10_000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # d = (0, 1, 1, 0, 0): 1 - 6 * 2 / (5 * 24)
    assert spearman([1, 2, 3, 4, 5], [1, 3, 2, 4, 5]) == pytest.approx(0.9)
    assert spearman([1, 1], [1, 2]) is None


def test_weights_of_a_rank_correlation_are_like_repeated_points():
    # Ranks 1, 2, 3 and 2, 1, 3 with weights 1, 1, 2: means 2.25, covariance 1.75, both spreads 2.75.
    assert spearman([1, 2, 3], [2, 1, 3], weights=[1, 1, 2]) == pytest.approx(1.75 / 2.75)
    assert spearman([1, 2, 3], [2, 1, 3], weights=[5, 5, 5]) == pytest.approx(spearman([1, 2, 3], [2, 1, 3]))


def test_errors_count_whatever_their_sign():
    found = [
        Point(kind=OpKind.MATMUL, estimated_us=20.0, measured_us=10.0),
        Point(kind=OpKind.MATMUL, estimated_us=10.0, measured_us=20.0),
        Point(kind=OpKind.NORM, estimated_us=40.0, measured_us=10.0),
    ]
    assert median_factor(found) == pytest.approx(2.0)
    row = sums_of(found)
    assert (row.estimated_us, row.measured_us) == (70.0, 40.0)
    assert row.misplaced_share == pytest.approx((10 + 10 + 30) / 40)
    kinds = by_kind(found)
    assert [(kind.kind, kind.ops) for kind in kinds] == [(OpKind.MATMUL, 2), (OpKind.NORM, 1)]
    assert kinds[0].misplaced_share == pytest.approx(20 / 30)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_both_plans_are_judged_on_the_measured_graph():
    truth = residual_tower(6)
    swapped = tuple(100.0 / (1.0 + op.time_us) for op in truth.ops)
    guess = truth.with_times(swapped, timing=Timing(kind=TimingKind.ESTIMATED, device="d"))
    row = calibration.plan_pair(guess, truth, "mutwo", "60%", time_limit_s=2)
    same = calibration.plan_pair(truth, truth, "mutwo", "60%", time_limit_s=2)
    assert same.from_estimated.overhead == same.from_measured.overhead == same.estimated_overhead
    assert row.from_measured.overhead == same.from_measured.overhead
    assert row.from_estimated.overhead != row.estimated_overhead
    assert row.from_estimated.over_bytes == 0  # workspaces are alike, so the bytes are


def pair(own, other, *, own_over=0, other_over=0, above_start_bytes=1000):
    def judged(overhead, over_bytes):
        return JudgedPlan(overhead=overhead, peak_bytes=1, over_bytes=over_bytes, solve_s=1.0)

    return PlanPair(
        strategy="mutwo",
        budget="50%",
        budget_bytes=2 * above_start_bytes,
        above_start_bytes=above_start_bytes,
        from_measured=judged(own, own_over),
        from_estimated=judged(other, other_over),
        estimated_overhead=0.09,
        estimated_peak_bytes=1,
    )


def model_row(*plans, estimated_us=9.0, rank_correlation=0.9):
    return CalibrationRow(
        model="m", times=("estimated for d", "measured on d"), ops=3, estimated_us=estimated_us, measured_us=10.0,
        median_factor=1.0, misplaced_share=0.1, rank_correlation=rank_correlation, weighted_rank_correlation=0.9,
        kinds=(), plans=plans,
    )  # fmt: skip


def test_a_plan_that_is_over_budget_on_the_measured_graph_says_by_how_much():
    cells = plan_cells("m", pair(0.1, 0.08, other_over=2**20, above_start_bytes=100 * 2**20))
    assert cells[3:] == ("10.00%", "8.00% (over)", "9.00%", "over by 1.0 MiB (1.0% of what the step may add)")


def test_a_strategy_without_a_plan_is_told_so_and_left_out_of_the_summary():
    cells = plan_cells("m", pair(None, 0.08, own_over=None))
    assert cells[3] == "no plan"
    assert pair(None, 0.08, own_over=None).extra is None


def test_a_summary_counts_only_budgets_that_a_plan_from_measured_times_meets():
    plans = [pair(0.10, 0.12), pair(0.10, 0.10, other_over=25), pair(0.10, 0.90, own_over=7, other_over=9)]
    rows = [model_row(*plans), model_row(estimated_us=12.0, rank_correlation=0.8)]
    text = summary(rows)
    assert "0.90x to 1.20x" in text
    assert "0.80 to 0.90" in text
    assert "+1.00 points" in text
    assert "mean of 2; worst +2.00" in text
    assert "1 of 2 of them is over budget, by 2.5%" in text
    assert "nothing to compare" in summary(rows[1:])


# -- the whole of it --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu():
    before = torch.get_rng_state()
    device = calibrated_cpu(TINY)
    assert torch.equal(before, torch.get_rng_state()), "a benchmark must leave the generator alone"
    return device


def test_a_calibrated_cpu_has_a_rate_for_every_kind(cpu):
    assert set(cpu.share_by_kind) == set(cpu.workspaces) == set(OpKind)
    assert all(share > 0 for share in cpu.share_by_kind.values())
    assert cpu.flops_for(torch.float32) > 0
    assert cpu.flops_for(torch.bfloat16) > 0
    assert (cpu.block_bytes, cpu.name.split(", ")[-1]) == (1, "calibrated")


def test_the_report_is_made_saved_tabled_and_drawn(cpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "calibrated_cpu", lambda sizes: cpu)
    out = tmp_path / "calibration.json"
    arguments = ["--import", "tests.bench.small:make", "--batch", "8", "--strategy", "mutwo", "--budget", "80%"]
    assert main(["calibrate", *arguments, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["times"][0] == f"estimated for {cpu.name}"
    assert row["times"][1].startswith("measured on")
    assert -1 <= row["rank_correlation"] <= 1
    assert sum(kind["ops"] for kind in row["kinds"]) == row["ops"]
    assert sum(kind["measured_us"] for kind in row["kinds"]) == pytest.approx(row["measured_us"])
    assert sum(len(points["measured_us"]) for points in row["points"].values()) == row["ops"]
    (plan,) = row["plans"]
    assert plan["from_measured"]["peak_bytes"] > 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    drawn = out.with_suffix(".png").read_bytes()
    page, figure = make_tables(tmp_path)
    assert figure.read_bytes() == drawn
    text = page.read_text(encoding="utf-8")
    assert "## Plans made from estimates, judged on measured times" in text
    assert "| tests.bench.small:make b8 | 80% | mutwo |" in text
    assert "matrix product" in capsys.readouterr().out


def test_rows_that_were_saved_without_their_points_have_no_figure(tmp_path):
    assert draw_points(tmp_path / "figure.png", [model_row()]) == []
    assert not list(tmp_path.iterdir())


def test_nothing_of_a_cpu_that_is_shown_says_measured(cpu, capsys):
    calibration.print_device(cpu)
    shown = capsys.readouterr().out
    assert "GFLOP/s" in shown
    assert "measured" not in shown
