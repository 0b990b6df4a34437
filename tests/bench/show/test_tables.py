"""Rows as tables."""

from bench.show.tables import aligned, markdown


def test_markdown_has_a_header_a_rule_and_one_line_a_row():
    assert markdown(("a", "b"), [("1", "x|y")]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"


def test_plain_text_has_columns_as_wide_as_their_widest_cell():
    assert aligned([("a", "b"), ("long", "c")]) == "a     b\nlong  c"
