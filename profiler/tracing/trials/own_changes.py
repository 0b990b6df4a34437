"""What a step changes of its own Python state: refused where the next step would read it, told where it is lost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from profiler.errors import CaptureError
from profiler.tracing.guards import Change, Guards, Left, Place, Selection, Weight, place_of

if TYPE_CHECKING:
    from profiler.tracing.trials.audit import OpSeen  # which needs this module
    from profiler.tracing.whole_step import TraceAgain  # so does this

WAYS_OUT = (
    "pass what changes in the batch, or plan the model alone with checkpoint_model(model, budget=...), which leaves "
    "the loop as it is"
)

_RANDOM = re.compile(r"rand|bernoulli|normal|dropout|uniform|multinomial")
_TOLD = 20  # so many of what is lost
_NAMED = 3  # so many changes are named in a sentence


def refuse_drawn(changes: Sequence[Change]) -> None:
    """CaptureError where a step draws from an object of Python's, which stands elsewhere at each step."""
    drawn = [change for change in changes if _is_drawn(change)]
    if drawn:
        raise CaptureError(
            f"the step draws from {_named(drawn)[0].removeprefix('the state of ')}, which moves on at each step, "
            f"and a captured step runs no Python: draw outside and {WAYS_OUT}"
        )


def refuse_carried(read: Sequence[str], *, because: Exception | None = None) -> None:
    """CaptureError where a step hands something to the next one that a graph cannot hand on: these."""
    if read:
        raise CaptureError(
            f"the step keeps what it computes for the next step to read: {'; '.join(read[:_NAMED])}. A "
            "captured step would read the same value again and again: make it a buffer of the model (register_buffer), "
            f"or {WAYS_OUT}{f'. Traced once more, it ended in: {because}' if because else ''}"
        ) from because


def refuse_grown(written: Sequence[str]) -> None:
    """CaptureError where a step changes what it made for good, of constants alone, at its first call."""
    if written:
        raise CaptureError(
            f"the step makes something at its first call and changes it at each later one: "
            f"{'; '.join(written[:_NAMED])}. A captured step would make it anew each time: make it a buffer of the "
            f"model (register_buffer), or {WAYS_OUT}; or run one step of your own before this call"
        )


def may_decide(guards: Guards) -> bool:
    """Whether a second trace is needed to see if what the step changed, or the time, makes a difference."""
    return bool(guards.once) or guards.trials.has_moved or guards.trials.has_constants


def of_data(ops: Sequence[OpSeen]) -> list[Any]:
    """The ops of a trace that do not compute with constants alone: what a step does, whatever it has made before."""
    constant, kinds = set[str](), list[Any]()
    for i, op in enumerate(ops):
        reads = re.findall(r"%\d+", op.takes)
        if "placeholder" not in op.takes and constant.issuperset(reads) and not _RANDOM.search(op.name):
            constant.add(f"%{i}")
        else:
            kinds.append(op.kind)
    return kinds


def refuse_deciding(first: Sequence[Change], second: Sequence[Change]) -> None:
    """CaptureError where the user's code reads what the step changes each time."""
    again = {change.path for change in second if change.weight is Weight.DECIDES}
    deciding = [c for c in first if c.weight is Weight.DECIDES and c.path in again and not c.is_a_librarys]
    if deciding:
        raise CaptureError(
            f"the step reads what it changes itself at each call: {'; '.join(map(str, deciding[:_NAMED]))}. A captured "
            f"step has one path and the same numbers each time: {WAYS_OUT}; where it is set at the first step only, "
            "run one step of your own before this call"
        )


def made_once(first: Sequence[Change], second: Sequence[Change]) -> list[Change]:
    """What the user's step changes at its first call, such as a mask that it makes, and leaves alone afterwards."""
    again = {change.path for change in second}
    read = (one for one in first if one.weight in (Weight.REMADE, Weight.DECIDES) and one.read)
    return [one for one in read if one.path not in again and not one.is_a_librarys]


def is_left(change: Change, found: Sequence[Left], live: Collection[Place]) -> bool:
    """Whether each call of the planned step changes this as the user's does; `found` is what its trace left."""
    if change.key is not None:
        return place_of(change.holder, change.key) in live
    new = [one for one in found if one.holder is change.holder and one.key not in one.holder.before]
    return bool(new) and len(new) == change.now - change.then and all(one.place in live for one in new)


def tell_lost(guards: Guards, again: TraceAgain | None) -> None:
    """Warn of what the step, now or `again`, does beside computing with tensors: a planned step does it no more."""
    traces = [(guards.changes, guards.left)] + ([(again.changes, again.left_later)] if again else [])
    changed = [(change, left.found) for changes, left in traces for change in changes if not change.is_a_librarys]
    lost = _named(change for change, found in changed if not is_left(change, found, guards.left.live))
    if lost:
        more = f" (and {len(lost) - _TOLD} more)" if len(lost) > _TOLD else ""
        _warn(
            f"the step changes Python objects, which a planned step does not do again, since it runs no Python: "
            f"{'; '.join(lost[:_TOLD])}{more}. Whoever reads one of these after a planned step finds what was there "
            "before the step was planned. Do that after the step, with what it returns, or use checkpoint_model"
        )
    if guards.once:
        _warn(
            f"the step {'; '.join(guards.once[:_NAMED])}, which a planned step does not do again, since it runs no "
            "Python: do so outside of the step, and pass what changes in the batch"
        )


def _warn(what: str) -> None:
    warnings.warn(what, UserWarning, stacklevel=2)


def _is_drawn(change: Change) -> bool:
    return change.holder.kind.selection is Selection.DRAWN


def _named(changes: Iterable[Change]) -> list[str]:
    return list(dict.fromkeys(change.path for change in changes))
