"""The figure of a trade-off: overhead against peak, one line a strategy, with what is proven impossible shaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiments.pareto.rows import TradeOff, TradeOffRow
from bench.show.axes import axes_for, unit_for
from planner.units import human_bytes

# Told apart by marker and dashes where colours are not: in grey print, and by the colour-blind.
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#b3541e", "marker": "s", "ls": (0, (6, 2))},
    {"color": "#7a7a7a", "marker": "^", "ls": (0, (1, 1))},
    {"color": "#3b6fb6", "marker": "D", "ls": (0, (5, 1.5, 1, 1.5))},
    {"color": "#b99a2d", "marker": "v", "ls": (0, (3, 1, 1, 1, 1, 1))},
)
PROVING: dict[str, Any] = {"color": "#14532d", "marker": "o", "ls": "-", "lw": 1.8, "zorder": 4}
SINGLE: dict[str, Any] = {"color": "#111111", "marker": "*", "ls": "none", "ms": 11, "zorder": 5}


def undominated(rows: Sequence[TradeOffRow]) -> list[tuple[int, float]]:
    """(peak, overhead) of the plans that no other beats in both, from the smallest peak to the largest."""
    plans = sorted(
        {(row.peak_bytes, row.overhead) for row in rows if row.peak_bytes is not None and row.overhead is not None}
    )
    kept: list[tuple[int, float]] = []
    for peak, overhead in plans:
        if not kept or overhead < kept[-1][1]:
            kept.append((peak, overhead))
    return kept


def proven_steps(rows: Sequence[TradeOffRow]) -> list[tuple[int, float]]:
    """(budget, least overhead up to it) from the smallest budget that is not proven impossible to the largest."""
    open_rows = [row for row in rows if row.bound is not None and not row.impossible]
    return sorted((row.budget_bytes, row.bound or 0.0) for row in open_rows)


def impossible_bytes(rows: Sequence[TradeOffRow]) -> int | None:
    """The largest budget that is proven to be met by no plan that recomputes once; None without one."""
    return max((row.budget_bytes for row in rows if row.impossible), default=None)


def draw_trade_off(path: Path, found: TradeOff) -> None:
    """Overhead against peak: the nearer to the lower left corner, the better."""
    size, unit = unit_for(found.peak_bytes)
    proving = [name for name in found.strategies if any(row.bound is not None for row in found.of(name))]
    lines = {name: undominated(found.of(name)) for name in found.strategies}
    with axes_for(path, width=10.0, height=5.0) as axes:
        left, right = _range(found, lines)
        top = 112 * max([overhead for line in lines.values() for _, overhead in line], default=0.0) or 1.0
        axes.set(xlim=(left / size, right / size), ylim=(0, top), ylabel="extra time of the step (%)")
        axes.set_xlabel(f"peak memory ({unit}); times {found.times}")
        axes.set_title(f"{found.graph}: the time that less memory costs", loc="left")
        for name in proving:
            _shade(axes, found.of(name), name, size)
        _draw_lines(axes, lines, proving, size)
        _mark_floor(axes, found, size)
        _add_shares(axes, found, size)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def _range(found: TradeOff, lines: dict[str, list[tuple[int, float]]]) -> tuple[float, float]:
    """From a little below the floor to a little above the unplanned peak."""
    least = min([found.floor_bytes, *(peak for line in lines.values() for peak, _ in line)])
    margin = 0.04 * max(1, found.peak_bytes - least)
    return least - margin, found.peak_bytes + margin


def _draw_lines(axes: Any, lines: dict[str, list[tuple[int, float]]], proving: Sequence[str], size: int) -> None:
    looks = iter(LOOKS * (1 + len(lines) // len(LOOKS)))
    for name, line in lines.items():
        if not line:
            continue
        look = PROVING if name in proving else SINGLE if len(line) == 1 else next(looks)
        peaks, overheads = [peak / size for peak, _ in line], [100 * overhead for _, overhead in line]
        options = {"ms": 4.5, "lw": 1.3, "zorder": 3, "clip_on": False} | look
        axes.plot(peaks, overheads, drawstyle="steps-post", label=name, **options)


def _shade(axes: Any, rows: Sequence[TradeOffRow], name: str, size: int) -> None:
    """Grey where the strategy has proven that no plan that recomputes once is."""
    steps = proven_steps(rows)
    impossible = impossible_bytes(rows)
    label = f"proven by {name}:\nno plan that\nrecomputes once"
    if impossible is not None:
        axes.axvspan(0, impossible / size, color="#e4e4e4", lw=0, zorder=0)
    if not steps:
        return
    budgets = [(impossible or 0) / size, *(budget / size for budget, _ in steps)]
    bounds = [100 * steps[0][1], *(100 * bound for _, bound in steps)]
    axes.fill_between(budgets, bounds, step="pre", color="#e4e4e4", lw=0, zorder=0, label=label)


def _mark_floor(axes: Any, found: TradeOff, size: int) -> None:
    axes.axvline(found.floor_bytes / size, color="#aa2222", lw=1.2, ls=(0, (4, 2)), zorder=2)
    axes.text(found.floor_bytes / size, 0.98, f" nothing runs in less than {human_bytes(found.floor_bytes)}",
              color="#aa2222", fontsize=9, rotation=90, ha="right", va="top",
              transform=axes.get_xaxis_transform())  # fmt: skip


def _add_shares(axes: Any, found: TradeOff, size: int) -> None:
    """The same axis in percent of what the unplanned step adds, as budgets are written."""
    added = max(1, found.peak_bytes - found.start_bytes)
    above = axes.secondary_xaxis(
        "top",
        functions=(
            lambda x: 100 * (x * size - found.start_bytes) / added,
            lambda share: (found.start_bytes + share / 100 * added) / size,
        ),
    )
    above.set_xlabel("budget (% of what the step adds to memory)", fontsize=9, color="#555555")
    above.tick_params(labelsize=9, colors="#555555")
