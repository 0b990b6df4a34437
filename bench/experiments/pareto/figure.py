"""The figure of a trade-off: overhead against peak, one line a strategy, with what is proven impossible shaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.experiments.host_links import JOINS
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
SINGLE: dict[str, Any] = {"ls": "none", "ms": 9, "zorder": 5}  # a point: nothing to be drawn through it

# With links a colour is a link, the darker the faster as they come, and a strategy has the look of its place.
LINK_COLORS = ("#14532d", "#9ecae1", "#3b8bc2", "#08306b", "#54278f", "#b3541e")
STRATEGY_LOOKS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "ls": "-", "lw": 1.8},
    {"marker": "D", "ls": (0, (5, 2))},
    {"marker": "^", "ls": (0, (1, 1.5))},
    {"marker": "s", "ls": (0, (6, 1.5, 1, 1.5))},
    {"marker": "v", "ls": (0, (3, 1, 1, 1, 1, 1))},
    {"marker": "P", "ls": (0, (8, 2))},
)
ROOM_ABOVE = 1.12
MOST_ABOVE = 2.0  # with links: the scale ends at so many times the dearest proven plan without one

Lines = dict[str, list[tuple[int, float]]]  # by name: (peak, overhead)


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
        top = top_of_scale(found, lines, proving)
        axes.set(xlim=(left / size, right / size), ylim=(0, 100 * top), ylabel="extra time of the step (%)")
        between = "\n" if len(found.links) > 1 else "; "  # longer names beside it leave less room
        axes.set_xlabel(f"peak memory ({unit}){between}times {found.times}")
        axes.set_title(f"{found.graph}: the time that less memory costs", loc="left")
        for name in [n for n in proving if not found.of(n)[0].host_link] or proving[:1]:
            _shade(axes, found.of(name), name if len(found.links) < 2 else f"{name}, without a link", size)
        _draw_lines(axes, lines, looks(found, lines, proving), size, top)
        _mark_floor(axes, found, size)
        _add_shares(axes, found, size)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def top_of_scale(found: TradeOff, lines: Lines, proving: Sequence[str]) -> float:
    """The largest overhead to draw; with links, no plan that moves at any price may flatten all others."""
    most = max([cost for line in lines.values() for _, cost in line], default=0.0)
    known = [cost for name in proving if not found.of(name)[0].host_link for _, cost in lines[name]]
    if len(found.links) > 1 and any(known):
        most = min(most, MOST_ABOVE * max(known))
    return ROOM_ABOVE * most or 0.01


def looks(found: TradeOff, lines: Lines, proving: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for every line, no two alike: by link and strategy where there are links, else by strategy."""
    if len(found.links) > 1:
        return _looks_by_link(found, lines, proving)
    others = iter(LOOKS * (1 + len(lines) // len(LOOKS)))
    return {
        name: PROVING if name in proving[:1] else next(others) | (SINGLE if len(line) == 1 else {})
        for name, line in lines.items()
        if line
    }


def _looks_by_link(found: TradeOff, lines: Lines, proving: Sequence[str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(name.partition(JOINS)[0] for name in [*proving, *lines] if lines[name]))
    colors = dict(zip(found.links, LINK_COLORS * len(found.links), strict=False))
    shapes = dict(zip(names, STRATEGY_LOOKS * len(names), strict=False))
    return {
        name: shapes[name.partition(JOINS)[0]]
        | {"color": colors[found.of(name)[0].host_link]}
        | (SINGLE if len(line) == 1 else {})
        for name, line in lines.items()
        if line
    }


def _range(found: TradeOff, lines: Lines) -> tuple[float, float]:
    """From a little below the floor to a little above the unplanned peak."""
    least = min([found.floor_bytes, *(peak for line in lines.values() for peak, _ in line)])
    margin = 0.04 * max(1, found.peak_bytes - least)
    return least - margin, found.peak_bytes + margin


def _draw_lines(axes: Any, lines: Lines, styles: dict[str, dict[str, Any]], size: int, top: float) -> None:
    for name, line in lines.items():
        if not line:
            continue
        peaks, overheads = [peak / size for peak, _ in line], [100 * overhead for _, overhead in line]
        within = [cost for cost in overheads if cost <= 100 * top]
        label = name if within else f"{name}: above, from {min(overheads):.0f}%"
        options = {"ms": 4.5, "lw": 1.3, "zorder": 3, "clip_on": len(within) < len(overheads)} | styles[name]
        axes.plot(peaks, overheads, drawstyle="steps-post", label=label, **options)


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
