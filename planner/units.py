"""Bytes as people write them, and budgets as they state them."""

from __future__ import annotations

import re

from planner.errors import BudgetError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
MOST_BYTES = 2**62  # beyond any machine, and below where sums of bytes stop being exact
_TOO_MUCH = f"no memory has {MOST_BYTES:,} bytes; give what the machine has, or a share of the step ('60%')"
RESERVED = "reserved"  # the kind of a budget that bounds what the allocator of a GPU holds, not only what lives in it
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%|[a-z]*)\s*", re.IGNORECASE)


def parse_budget(budget: str | int, *, start_bytes: int, peak_bytes: int) -> int:
    """Bytes of total peak. `"p%"` means start + p% of what the unplanned step adds to it.

    Of a budget of reserved memory, the bytes that may be reserved: no peak is larger.
    """
    number, unit = read_budget(budget, start_bytes=start_bytes)
    if unit != "%":
        return int(number * _UNITS[unit])
    return start_bytes + int(number / 100 * (peak_bytes - start_bytes))


def read_budget(budget: str | int, *, start_bytes: int | None = None) -> tuple[float, str]:
    """The number of a budget and its unit; BudgetError if it is none, whatever the step."""
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise BudgetError(f"budget {budget!r:.60}: give bytes as a whole number, or text such as '4GiB' or '60%'")
    if isinstance(budget, int) and abs(budget) >= MOST_BYTES:  # which may have too many digits to be text
        raise BudgetError(f"budget of {budget.bit_length():,} bits: {_TOO_MUCH}")
    match = _BUDGET.fullmatch(_amount(budget))
    unit = match[2].lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise BudgetError(
            f"budget {budget!r:.60}: give bytes ('4000000', '4GiB', '900MB') or a share of the step ('60%')"
        )
    if unit == "%" and is_reserved(budget):
        raise BudgetError(f"budget {budget!r:.60}: what a GPU's allocator may hold is said in bytes ('reserved:16GiB')")
    number = float(match[1])
    if number * _UNITS.get(unit, 1) >= MOST_BYTES:
        raise BudgetError(f"budget {budget!r:.60}: {_TOO_MUCH}")
    if number == 0 or (unit != "%" and number * _UNITS[unit] < 1):
        needed = "" if start_bytes is None else f"; the step starts at {human_bytes(start_bytes)}"
        raise BudgetError(f"budget {budget!r}: nothing runs in no memory{needed}")
    return number, unit


def is_reserved(budget: str | int) -> bool:
    """Whether a budget bounds what an allocator holds ('reserved:16GiB'), more than what lives at once."""
    return isinstance(budget, str) and budget.partition(":")[0].strip().lower() == RESERVED and ":" in budget


def _amount(budget: str | int) -> str:
    """A budget without its kind; BudgetError for a kind that does not exist."""
    kind, colon, amount = str(budget).partition(":")
    if not colon:
        return kind
    if kind.strip().lower() != RESERVED:
        raise BudgetError(
            f"budget {budget!r:.60}: there is no budget of kind {kind.strip()!r:.30}; give bytes ('4GiB'), a share "
            "('60%'), or what a GPU's allocator may hold ('reserved:16GiB')"
        )
    return amount


def human_bytes(nbytes: int) -> str:
    """Bytes as people write them: '0.97 GiB'."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
