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


def test_rows_without_a_known_table_are_refused_by_name(tmp_path):
    save_rows(tmp_path / "mystery.json", command="x", rows=[])
    with pytest.raises(FileFormatError, match=r"mystery\.json"):
        make_tables(tmp_path)


def test_the_committed_tables_are_those_of_the_committed_rows(tmp_path):
    for source in RESULTS.glob("*.json"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    for made in (path for path in make_tables(tmp_path) if path.suffix == ".md"):
        assert made.read_text(encoding="utf-8") == (RESULTS / made.name).read_text(encoding="utf-8")
