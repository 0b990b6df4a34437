"""What every figure shares: axes that are saved when done, units, and one colour per role and phase.

Matplotlib is imported to draw only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planner.extras import needs_extra
from planner.ir import Phase, Role

# One colour per role, chosen to be told apart in print and by the colour-blind.
ROLE_COLORS = {
    Role.PARAM: "#4c72b0",
    Role.BUFFER: "#64b5cd",
    Role.OPT_STATE: "#8172b3",
    Role.INPUT: "#8c8c8c",
    Role.OUTPUT: "#333333",
    Role.GRADIENT: "#dd8452",
    Role.TEMP: "#ccb974",
    Role.ACTIVATION: "#55a868",
}
PHASE_COLORS = {Phase.FORWARD: "#eef5ee", Phase.BACKWARD: "#fdf1ea", Phase.OPTIMIZER: "#f1eef7"}
ROLE_NAMES = {Role.PARAM: "parameters", Role.BUFFER: "buffers", Role.OPT_STATE: "optimizer state"}
ROLE_NAMES |= {Role.INPUT: "batch", Role.OUTPUT: "outputs", Role.GRADIENT: "gradients", Role.TEMP: "temporaries"}
ROLE_NAMES |= {Role.ACTIVATION: "activations"}
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


def unit_for(nbytes: float) -> tuple[int, str]:
    """The unit of an axis that ends at `nbytes`: its size and its name."""
    return next((unit for unit in UNITS if nbytes >= unit[0]), UNITS[-1])


@contextmanager
def axes_for(path: Path, *, width: float = 9.0, height: float = 4.5) -> Iterator[Any]:
    """Axes to draw on; saved to `path` when done."""
    with axes_beside(path, [1], width=width, height=height) as (axes,):
        yield axes


@contextmanager
def axes_beside(path: Path, shares: Sequence[float], *, width: float, height: float = 4.5) -> Iterator[list[Any]]:
    """Axes side by side, as wide as their shares; saved to `path` when done."""
    pyplot = _pyplot()
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            1, len(shares), figsize=(width, height), layout="constrained", squeeze=False, width_ratios=shares
        )
        try:
            yield list(grid[0])
            figure.savefig(path, dpi=150)
        finally:
            pyplot.close(figure)


@contextmanager
def axes_in_grid(path: Path, count: int, *, title: str) -> Iterator[Any]:
    """`count` axes in rows of three, blank until used; saved to `path` when done."""
    pyplot = _pyplot()
    columns = min(3, count)
    rows = -(-count // columns)
    style: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.titlesize": 10}
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(4 * columns, 3.7 * rows), layout="constrained", squeeze=False
        )
        cells = [axes for line in grid for axes in line]
        for axes in cells:
            axes.set_axis_off()
        figure.suptitle(title)
        try:
            yield cells
            figure.savefig(path, dpi=130)
        finally:
            pyplot.close(figure)


def _pyplot() -> Any:
    with needs_extra("bench"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    return pyplot
