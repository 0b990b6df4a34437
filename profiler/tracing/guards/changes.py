"""What a step itself changes of the user's Python, and what that means for a captured step."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from profiler.tracing.guards.exact import was_and_is
from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.kinds import Selection
from profiler.tracing.guards.territory import is_installed


class Weight(Enum):
    """What it means for a captured step that the step itself changes something."""

    LOST = "nothing but that it does not happen again"
    DECIDES = "the next step reads another value than this one did"
    CARRIED = "the next step reads what this one computed, unless it writes that first"
    REMADE = "none: the captured step makes the same again each time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that the step itself changed while it was traced."""

    path: str
    then: Any
    now: Any
    read: bool  # False where it is only written, or read only to be written back
    weight: Weight
    holder: Holder = field(repr=False, compare=False)
    key: Any = None  # None where entries were added or taken away
    by_user: bool = False  # whether the user's own code has that name in it, not a library's alone

    @property
    def is_a_librarys(self) -> bool:
        """Whether an installed library keeps this for itself."""
        what, held_as = self.holder.what, self.holder.kind.selection
        kind = what if isinstance(what, type) else type(what)
        theirs = held_as is Selection.NAMES and is_installed(kind.__module__) and not self.by_user
        return self.holder.lenient or theirs

    def __str__(self) -> str:
        return was_and_is(self.path, self.then, self.now)
