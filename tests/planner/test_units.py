"""Bytes and budgets as people write them."""

import pytest

from planner.errors import BudgetError
from planner.units import human_bytes, parse_budget

START, PEAK = 1_000, 5_000


def budget(text) -> int:
    return parse_budget(text, start_bytes=START, peak_bytes=PEAK)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("50%", 3_000),
        ("100%", 5_000),
        ("12.5 %", 1_500),
        ("150%", 7_000),
        ("4GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("900 MB", 900_000_000),
        (" 1.5 KiB ", 1536),
        (".5kb", 500),
        ("2TiB", 2 * 2**40),
        ("4000000", 4_000_000),
        ("17 B", 17),
        (4_000_000, 4_000_000),
        (1, 1),
    ],
)
def test_a_budget_is_bytes_or_a_share_of_what_the_step_adds(text, nbytes):
    assert budget(text) == nbytes


@pytest.mark.parametrize("text", ["4 bananas", "", "%", "GiB", "-3", -3, "1e9", "4GiB8", "five", "4..5", "4 Gi B"])
def test_a_budget_that_cannot_be_read_says_how_to_write_one(text):
    with pytest.raises(BudgetError) as caught:
        budget(text)
    assert f"budget {text!r}: give bytes" in str(caught.value)
    assert "4GiB" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"4GiB"])
def test_a_budget_of_another_type_is_refused(value):
    with pytest.raises(BudgetError, match="give bytes as a whole number, or text"):
        budget(value)


@pytest.mark.parametrize("nothing", ["0", 0, "0%", "0.0 GiB", "0.5 B"])
def test_no_memory_at_all_is_refused_with_what_the_step_starts_at(nothing):
    with pytest.raises(BudgetError, match="nothing runs in no memory; the step starts at 1000 B"):
        budget(nothing)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (int(0.97 * 2**30), "993.3 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**41, "2048.00 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit_that_leaves_a_whole_part(nbytes, text):
    assert human_bytes(nbytes) == text


MUCH = {
    "digits": "9" * 5000,
    "a number": 10**5000,
    "less than nothing": -(10**5000),
    "a share": "9" * 5000 + "%",
    "just too much": f"{2**62}",
    "just too large a number": 2**62,
    "units": "5000000TiB",
}


@pytest.mark.parametrize("case", MUCH)
def test_more_than_any_memory_has_is_refused_in_one_line(case):
    much = MUCH[case]
    with pytest.raises(BudgetError) as caught:
        budget(much)
    assert "no memory has 4,611,686,018,427,387,904 bytes" in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "NaN%", float("nan"), float("inf"), "-5GiB", "x" * 5000])
def test_what_is_no_number_is_refused_in_one_line(value):
    with pytest.raises(BudgetError, match="give bytes") as caught:
        budget(value)
    assert len(str(caught.value)) < 250
