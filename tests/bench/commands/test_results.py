"""Tables of the results folder, made from rows."""

import json

import pytest

from bench.__main__ import main
from bench.commands.results import RESULTS, make_tables, markdown
from bench.experiments.results_file import save_rows
from planner.errors import FileFormatError
from planner.synthetic import residual_tower


def test_markdown_has_a_header_a_rule_and_one_line_a_row():
    assert markdown(("a", "b"), [("1", "x|y")]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"


def test_a_matrix_of_exactness_is_made_from_its_rows(tmp_path):
    rows = [
        {
            "model": "m",
            "optimizer": "sgd",
            "strategy": s,
            "exact": s == "a",
            "first_mismatch": "w",
            "dropped_share": 0.5,
        }
        for s in ("a", "b")
    ]
    save_rows(tmp_path / "exactness.json", rows=rows)
    (page,) = make_tables(tmp_path)
    assert "| m | sgd | exact, 50% dropped | DIFFERS: w, 50% dropped |" in page.read_text(encoding="utf-8")


def plans_row(strategy, **given):
    row = {
        "graph": "g", "budget": "50%", "strategy": strategy, "status": "fits", "peak_bytes": 150, "start_bytes": 100,
        "unplanned_peak_bytes": 200, "overhead": 0.1, "gap": None, "solve_s": 1.0, "solve_cpu_s": 0.5,
        "found_by": "", "note": "",
    }  # fmt: skip
    return row | given


def test_a_table_of_plans_says_who_won_and_what_the_program_reached_alone(tmp_path):
    rows = [
        plans_row("mutwo"),
        plans_row("ilp", gap=0.004, found_by="polish"),
        plans_row("ilp:seeds=false", gap=0.02, overhead=0.12, solve_cpu_s=2.5),
        plans_row("ilp", budget="40%", gap=0.0, found_by="mutwo"),
        plans_row("ilp:seeds=false", budget="40%", status="over budget"),
    ]
    save_rows(tmp_path / "plans.json", rows=rows)
    (page,) = make_tables(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| g | 50% | mutwo | fits | 50.0% | 10.00% | - | 1.00 | 0.50 | - | - |" in text
    assert "| ilp | fits | 50.0% | 10.00% | 0.40% | 1.00 | 0.50 | polish | 12.00%, gap 2.00%, 2.5 CPU s |" in text
    assert "| 0.00% | 1.00 | 0.50 | mutwo | over budget, 0.5 CPU s |" in text
    assert "seeds=false" not in text


OF_A_STEP = ["peak_breakdown.png", "memory.png", "largest_activations.png", "time_by_kind.png"]
OF_A_PLAN = ["memory_mutwo_50pct.png", "plan_mutwo_50pct.png", "plan_mutwo_50pct.txt"]


@pytest.mark.parametrize(("blocks", "names"), [(30, OF_A_STEP + OF_A_PLAN), (1, OF_A_STEP)])
def test_a_saved_step_has_its_figures_drawn_again_and_those_of_a_plan_if_there_is_one(tmp_path, blocks, names):
    (tmp_path / "tower").mkdir()
    residual_tower(blocks).save(tmp_path / "tower" / "graph.json")
    written = make_tables(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in written] == [f"tower/{name}" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written if path.suffix == ".png")


def test_a_curve_saved_by_pareto_becomes_a_page_and_its_figure(tmp_path):
    rows = tmp_path / "pareto_tower.json"
    options = ["--strategy", "keep_all,mutwo,ilp", "--budget", "100%,70%", "--out", str(tmp_path / "out")]
    assert main(["pareto", "--synthetic", "tower", *options, "--json", str(rows)]) == 0
    assert {"command", "versions", "machine", "commit"} <= set(json.loads(rows.read_text()))
    page, figure = make_tables(tmp_path)
    assert (page.name, figure.name) == ("pareto_tower.md", "pareto_tower.png")
    text = page.read_text(encoding="utf-8")
    assert "| budget | peak at most | keep_all | mutwo | ilp | least by ilp | gap | found by |" in text
    assert "no plan at all runs in less than" in text
    assert "(pareto_tower.png)" in text
    assert figure.read_bytes() == (tmp_path / "out" / "pareto_tower_30.png").read_bytes()


def test_rows_that_are_not_one_curve_are_refused_with_the_way_on(tmp_path):
    rows = tmp_path / "pareto_two.json"
    assert main(["pareto", "--synthetic", "tower", "--budget-for", "5%", "--json", str(rows)]) == 0
    with pytest.raises(FileFormatError, match="without --budget-for"):
        make_tables(tmp_path)


def test_rows_without_a_known_table_are_refused_by_name(tmp_path):
    save_rows(tmp_path / "mystery.json", rows=[])
    with pytest.raises(FileFormatError, match=r"mystery\.json"):
        make_tables(tmp_path)


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path):
    for source in RESULTS.glob("*.json"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    for made in (path for path in make_tables(tmp_path) if path.suffix == ".md"):
        assert made.read_text(encoding="utf-8") == (RESULTS / made.name).read_text(encoding="utf-8")
