"""Strategies that propose plans: found by name, by entry point, or in a file."""

from runpy import run_path

run_path(f"{__path__[0]}/../planner/shadowing.py")["check"](__path__[0], "planner")

from strategies.registry import ENTRY_POINT_GROUP, make, names, split_specs

__all__ = ["ENTRY_POINT_GROUP", "make", "names", "split_specs"]
