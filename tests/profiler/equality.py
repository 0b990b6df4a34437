"""Moved to tests.side_by_side; this name goes once no test imports it."""

from tests.side_by_side import assert_captured_equals_eager, same_bits

__all__ = ["assert_captured_equals_eager", "same_bits"]
