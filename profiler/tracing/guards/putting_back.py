"""What a trial changed is put back; and laid out once more, as the trial left it, for a second one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from profiler.tracing.guards.holders import Holder
from profiler.tracing.guards.kinds import CannotPutBackError, Selection
from profiler.tracing.guards.snapshots import Snapshots
from profiler.tracing.guards.stale import Stale
from profiler.tracing.guards.territory import is_own


class PuttingBack:
    """What holders held when they were found, and what a step left there."""

    def __init__(self, all_holders: Callable[[], Iterable[Holder]], beside: Snapshots) -> None:
        self._all_holders = all_holders
        self._beside = beside
        self._left: dict[bool, _Left] = {}  # with constants laid out, and without
        self.constants: set[int] = set()  # stand-ins that hold the same in every step, by their ids

    def put_back(self) -> list[str]:
        """Give every object what it held when it was found; what the step does to those that take nothing back.

        Registries of installed libraries keep what is not a stand-in: theirs may grow.
        """
        every = list(self._all_holders())
        theirs = (holder for holder in every if not holder.late and not is_own(type(holder.what)))
        changed = [holder for holder in theirs if not holder.is_as_before()]
        kept = {id(holder.what) for holder in every}
        left = [holder for holder in changed if not holder.lenient]
        self._left = {flag: _Left.by(left, kept, self.constants, with_constants=flag) for flag in (False, True)}
        self._beside.put_back()
        stubborn = []
        for holder in changed:
            try:
                holder.put_back_stand_ins() if holder.lenient else holder.put_back()
            except CannotPutBackError:
                drawn = holder.kind.selection is Selection.DRAWN
                stubborn.append(f"{'draws from' if drawn else 'changes'} {holder.path}")
        return stubborn

    @property
    def has_moved(self) -> bool:
        """Whether the step changed anything but what it makes of constants."""
        return any(not holder.is_as_before(after) for holder, after in self._left[False].contents)

    @property
    def has_constants(self) -> bool:
        """Whether it left something there that it makes of constants."""
        return len(self._left[True].stale.sentences) > len(self._left[False].stale.sentences)

    @contextmanager
    def as_after(self, *, with_constants: bool = False) -> Iterator[Stale]:
        """Inside, what the step changed is as it left it, of what it computed stale things; then it is put back."""
        left = self._left[with_constants]
        try:
            for holder, after in left.contents:
                holder.kind.write(holder.what, after)
            yield left.stale
        finally:
            for holder, _ in left.contents:
                holder.put_back()


@dataclass(frozen=True, kw_only=True)
class _Left:
    """What a step left in holders, with stale things for what it computed."""

    stale: Stale
    contents: list[tuple[Holder, dict[Any, Any]]]

    @staticmethod
    def by(changed: list[Holder], kept: set[int], constants: set[int], *, with_constants: bool) -> _Left:
        stale = Stale(kept=kept, constants=constants)
        contents = [(holder, stale.contents_of(holder, with_constants=with_constants)) for holder in changed]
        stale.release()
        return _Left(stale=stale, contents=contents)


def cannot_be_put_back(what: list[str]) -> str:
    """The sentence on what a step changes and nobody can undo."""
    return (
        f"the step {' and '.join(what[:3])}, which cannot be put back after it was tried: do that outside of the step "
        "and pass what comes of it in the batch, or plan the model alone with checkpoint_model(model, budget=...)"
    )
