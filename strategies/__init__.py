"""Strategies that propose plans: found by name, by entry point, or in a file."""

from strategies.registry import ENTRY_POINT_GROUP, make, names, split_specs

__all__ = ["ENTRY_POINT_GROUP", "make", "names", "split_specs"]
