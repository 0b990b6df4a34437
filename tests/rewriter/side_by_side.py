"""Moved to tests.side_by_side; this name goes once no test imports it."""

from tests.side_by_side import (
    assert_captured_equals_eager,
    assert_planned_equals_eager,
    assert_same,
    demanding,
    eager,
    history,
    measured,
    measured_peak,
    seeded,
    snapshot,
    varied,
)

__all__ = [
    "assert_captured_equals_eager",
    "assert_planned_equals_eager",
    "assert_same",
    "demanding",
    "eager",
    "history",
    "measured",
    "measured_peak",
    "seeded",
    "snapshot",
    "varied",
]
