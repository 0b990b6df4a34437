"""Tables of the results folder, made from rows."""

import pytest

from bench.results import save_rows
from bench.tables import RESULTS, make_tables, markdown
from planner.errors import FileFormatError


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
    save_rows(tmp_path / "exactness.json", command="x", rows=rows)
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
    save_rows(tmp_path / "plans.json", command="x", rows=rows)
    (page,) = make_tables(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "| g | 50% | mutwo | fits | 50.0% | 10.00% | - | 1.00 | 0.50 | - | - |" in text
    assert "| ilp | fits | 50.0% | 10.00% | 0.40% | 1.00 | 0.50 | polish | 12.00%, gap 2.00%, 2.5 CPU s |" in text
    assert "| 0.00% | 1.00 | 0.50 | mutwo | over budget, 0.5 CPU s |" in text
    assert "seeds=false" not in text


def test_rows_without_a_known_table_are_refused_by_name(tmp_path):
    save_rows(tmp_path / "mystery.json", command="x", rows=[])
    with pytest.raises(FileFormatError, match=r"mystery\.json"):
        make_tables(tmp_path)


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path):
    for source in RESULTS.glob("*.json"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    for made in (path for path in make_tables(tmp_path) if path.suffix == ".md"):
        assert made.read_text(encoding="utf-8") == (RESULTS / made.name).read_text(encoding="utf-8")
