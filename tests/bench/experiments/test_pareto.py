"""The trade-off curve: what is told of it, drawn of it, and that it needs no torch on graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.pareto.figure import (
    draw_trade_off,
    impossible_bytes,
    looks,
    proven_steps,
    top_of_scale,
    undominated,
)
from bench.experiments.pareto.rows import TradeOff, TradeOffRow, caption, overhead_table
from bench.experiments.pareto.run import PARETO, trade_off
from bench.experiments.registry import load
from bench.experiments.results_file import save_rows
from planner.errors import FileFormatError
from planner.plan import Plan
from planner.synthetic import residual_tower
from strategies.keep_all import KeepAll

ROOT = Path(__file__).parents[3]
BUDGETS = ["100%", "80%", "60%", "10%"]


@pytest.fixture(scope="module")
def found() -> TradeOff:
    return trade_off(residual_tower(5), ["keep_all", "mutwo", "ilp"], BUDGETS, time_limit_s=5)


def row(budget: int, peak: int | None, overhead: float | None, **options) -> TradeOffRow:
    given = {"bound": None, "impossible": False} | options
    return TradeOffRow(
        graph="g", strategy="s", budget=str(budget), budget_bytes=budget, peak_bytes=peak, overhead=overhead,
        found_by="", solve_s=0.0, times="made up", start_bytes=1, floor_bytes=2, unplanned_peak_bytes=100, **given,
    )  # fmt: skip


def test_every_strategy_has_a_row_for_every_budget_and_none_is_below_the_bound(found):
    assert found.strategies == ["keep_all", "mutwo", "ilp"]
    assert all([r.budget for r in found.of(name)] == BUDGETS for name in found.strategies)
    for mine, greedy in zip(found.of("ilp"), found.of("mutwo"), strict=True):
        assert mine.bound is not None
        for r in (mine, greedy):
            if r.overhead is not None:
                assert r.peak_bytes <= r.budget_bytes
                assert mine.bound <= r.overhead + 1e-9
    assert found.of("ilp")[-1].impossible
    assert [r.overhead for r in found.of("keep_all")] == [0.0, None, None, None]
    assert found.floor_bytes <= min(r.peak_bytes for r in found.rows if r.peak_bytes is not None)


def test_a_plan_that_meets_the_next_budget_too_is_not_looked_for_again(monkeypatch):
    asked = []

    def plan(self, problem):
        asked.append(problem.budget_bytes)
        return Plan()

    monkeypatch.setattr(KeepAll, "plan", plan)
    curve = trade_off(residual_tower(2), ["keep_all"], ["300%", "200%", "100%", "50%"], time_limit_s=1)
    assert [r.overhead for r in curve.rows] == [0.0, 0.0, 0.0, None]
    assert asked == [curve.rows[0].budget_bytes, curve.rows[3].budget_bytes]


def test_the_table_shows_the_bound_and_the_gap_beside_what_was_found(found):
    columns, lines = overhead_table(found)
    assert columns == ["budget", "peak at most", "keep_all", "mutwo", "ilp", "least by ilp", "gap", "found by"]
    assert [line[0] for line in lines] == BUDGETS
    assert lines[0][-3:] == ["0.00%", "0.0%", "keeping everything"]
    assert lines[-1][4:6] == ["-", "no plan"]


def test_where_the_time_limit_cut_a_search_is_told_beside_the_table(found):
    assert not any(r.cut_off for r in found.rows)
    assert "Cut off" not in caption(found)
    hurried = trade_off(residual_tower(5), ["mutwo", "ilp"], ["60%", "50%"], time_limit_s=1e-9)
    assert [r.cut_off for r in hurried.of("ilp")] == [True, True]
    cut = ", ".join(r.budget for r in hurried.of("mutwo") if r.cut_off)
    assert f"another run may differ: mutwo at {cut}; ilp at 60%, 50%." in caption(hurried)


def test_only_plans_that_no_other_beats_are_drawn():
    rows = [
        row(100, 90, 0.0),
        row(90, 90, 0.0),
        row(80, 60, 0.3),
        row(70, 70, 0.2),
        row(60, 60, 0.2),
        row(9, None, None),
    ]
    assert undominated(rows) == [(60, 0.2), (90, 0.0)]


def test_the_shaded_steps_end_where_every_plan_is_impossible():
    rows = [
        row(90, 80, 0.1, bound=0.05),
        row(60, None, None, bound=0.2),
        row(30, None, None, bound=0.2, impossible=True),
    ]
    assert proven_steps(rows) == [(60, 0.2), (90, 0.05)]
    assert impossible_bytes(rows) == 30
    assert impossible_bytes(rows[:2]) is None


def test_the_figure_is_drawn_also_where_nothing_fits(found, tmp_path):
    bare = [replace(r, peak_bytes=None, overhead=None) for r in found.rows]
    for name, curve in (("all", found), ("none", replace(found, rows=tuple(bare)))):
        draw_trade_off(tmp_path / f"{name}.png", curve)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_saved_rows_are_the_same_curve_again(found, tmp_path):
    save_rows(tmp_path / "curve.json", PARETO, found.rows)
    experiment, results = load(tmp_path / "curve.json")
    assert experiment is PARETO
    assert TradeOff.of_one_graph(results.rows) == found


def test_rows_of_two_graphs_are_not_one_curve(found):
    other = [replace(r, graph="other") for r in found.rows]
    with pytest.raises(FileFormatError, match="rows of other, tower-5 are not one curve"):
        TradeOff.of_one_graph([*found.rows, *other])


def test_a_saved_graph_gives_its_curve_and_a_budget_where_importing_torch_fails(without_torch):
    assert "tower-5: overhead against memory" in without_torch.said
    assert "at most 5.0% slower, the step runs in" in without_torch.said
    assert (without_torch.folder / "pareto_tower_5.png").read_bytes().startswith(b"\x89PNG")
    experiment, results = load(without_torch.folder / "my_curve.json")
    assert experiment is PARETO
    assert TradeOff.of_one_graph(results.rows).strategies == ["keep_all", "sqrtn", "cheap", "mutwo", "ilp"]
    (least,) = load(without_torch.folder / "least.json")[1].rows
    assert least.floor_bytes <= least.peak_bytes < least.unplanned_peak_bytes
    assert least.overhead <= 0.05


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--synthetic", "castle"], "unknown graph 'castle': there are chain"),
        (["--synthetic", "tower", "--roofline"], "--synthetic and --roofline contradict each other"),
        (["--synthetic", "tower", "--budget-for", "5%", "--budget", "50%"], "--budget-for and --budget contradict"),
        (["--synthetic", "tower", "--budget-for", "5%", "--strategy", "ilp"], "--budget-for and --strategy contradict"),
        (["--synthetic", "tower", "--budget", "4 bananas"], "4 bananas"),
        (["--graph", "no/such/graph.json"], "there is no such file"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["pareto", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["5", "-1%", "five%"])
def test_an_overhead_that_is_no_share_is_refused_by_the_parser(text, capsys):
    assert main(["pareto", "--synthetic", "tower", f"--budget-for={text}"]) == 2
    assert "such as 5%" in capsys.readouterr().err


def curves(*lines: tuple[str, str, list[tuple[int, float]]]) -> TradeOff:
    """Made-up lines: a strategy, its link, and the (peak, overhead) of each budget."""
    return TradeOff(
        rows=tuple(
            replace(row(peak, peak, overhead), strategy=strategy, host_link=link)
            for strategy, link, line in lines
            for peak, overhead in line
        )
    )


def drawn(found: TradeOff, proving: list[str]):
    lines = {name: undominated(found.of(name)) for name in found.strategies}
    return looks(found, lines, proving), top_of_scale(found, lines, proving)


def test_no_two_lines_look_alike_though_each_has_one_point():
    found = curves(*((name, "", [(50, 0.1)]) for name in ("keep_all", "sqrtn", "cheap", "mutwo")))
    styles, _ = drawn(found, [])
    assert len({(look["color"], look["marker"]) for look in styles.values()}) == 4
    assert {look["ls"] for look in styles.values()} == {"none"}


def test_with_links_a_colour_is_a_link_and_a_shape_a_strategy():
    line = [(50, 0.1), (80, 0.05)]
    named = [
        (f"{name} + host at {link}" if link else name, link) for name in ("ilp", "mutwo") for link in ("", "1", "2")
    ]
    found = curves(*((name, link, line) for name, link in named))
    styles, _ = drawn(found, ["ilp"])
    assert len({(look["color"], look["marker"]) for look in styles.values()}) == 6
    assert styles["ilp"]["color"] == styles["mutwo"]["color"]
    assert styles["ilp"]["marker"] == styles["ilp + host at 2"]["marker"]


def test_a_plan_that_moves_at_any_price_does_not_flatten_the_others(tmp_path):
    lines = (
        ("ilp", "", [(50, 0.2)]),
        ("ilp + host at 1", "1", [(50, 0.1)]),
        ("offload_only + host at 1", "1", [(50, 4.0)]),
    )
    found = curves(*lines)
    assert drawn(found, ["ilp"])[1] < 0.5
    draw_trade_off(tmp_path / "curve.png", found)
    assert drawn(curves(lines[0], ("cheap", "", [(50, 4.0)])), ["ilp"])[1] > 4.0  # without links all of it is shown


def test_with_links_a_table_has_a_line_for_every_plan():
    columns, lines = overhead_table(
        curves(("ilp", "", [(50, 0.2)]), ("ilp + host at 1", "1", [(50, 0.1)]), ("mutwo + host at 1", "1", [(50, 0.1)]))
    )
    assert [line[2:5] for line in lines] == [
        ("none", "ilp", "20.00%"),
        ("1", "ilp", "10.00%"),
        ("1", "mutwo", "10.00%"),
    ]
    assert len(columns) == len(lines[0])
