"""The front door for people: `python -m bench`, and `bench.fit.fit()`."""

from runpy import run_path

run_path(f"{__path__[0]}/../planner/shadowing.py")["check"](
    __path__[0], "planner", "profiler", "strategies", "rewriter"
)
