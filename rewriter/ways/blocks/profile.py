"""What one training step showed of a model's modules: who was called when, what each keeps, and how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from profiler.measuring.meters import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module. Moments are positions in the record of marks; storages are known by numbers.

    `position` is its place among the children of an nn.Sequential that called it, and None elsewhere.
    """

    id: int
    path: str
    ordinal: int  # which call of that module in one forward, from 0
    parent: int | None  # the call that it was made in; None for calls by the model itself
    position: int | None
    enter: int
    leave: int
    given: tuple[int, ...]  # storages that it was called with, made in this step
    gradient_in: int | None  # when gradients of what it returned arrived; None where none did
    gradient_out: int | None  # when gradients of what it was given were complete
    why_not: str = ""  # why it cannot be run a second time


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStorage:
    """Memory that was made in the step and handed around or kept for the backward."""

    nbytes: int
    seen: int  # the mark before which it was made
    gone: int | None  # the mark before which it was freed; None for what outlives the step
    savers: frozenset[int | None]  # the innermost calls that kept it for their backward; None: outside of all


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """A step of a model as hooks saw it. `spans[i]` ends at mark `i`; the last one follows the last mark."""

    calls: tuple[ModuleCall, ...]
    storages: Mapping[int, SeenStorage]
    spans: tuple[Span, ...]
    turn: int  # the mark at which the backward reached the model
    end: int  # the mark at which it was over
    parameter_bytes: int  # and buffers
    batch_bytes: int
    gradient_bytes: int  # that were there before
    replay_bytes: int  # generator states that one recomputation keeps
    device: str
    name: str

    def between(self, first: int, last: int) -> Span:
        """From mark `first` (-1: from the beginning) to mark `last`, as one span."""
        spans = self.spans[first + 1 : last + 1]
        return Span(
            before_bytes=spans[0].before_bytes,
            peak_bytes=max(span.peak_bytes for span in spans),
            after_bytes=spans[-1].after_bytes,
            time_us=sum(span.time_us for span in spans),
        )

    @cached_property
    def children(self) -> Mapping[int | None, tuple[ModuleCall, ...]]:
        """The calls that were made in a call, in their order."""
        found: dict[int | None, list[ModuleCall]] = {}
        for call in self.calls:
            found.setdefault(call.parent, []).append(call)
        return {parent: tuple(calls) for parent, calls in found.items()}

    @cached_property
    def within(self) -> Mapping[int, frozenset[int]]:
        """Per call: itself and all that were made in it, directly or not."""
        found: dict[int, set[int]] = {}
        for call in reversed(self.calls):  # those made in a call come after it
            own = found.setdefault(call.id, set())
            own.add(call.id)
            if call.parent is not None:
                found.setdefault(call.parent, set()).update(own)
        return {call: frozenset(ids) for call, ids in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What is recomputed or kept as a whole: one call, or consecutive ones of an nn.Sequential."""

    calls: tuple[ModuleCall, ...]
    saved: frozenset[int] = field(default=frozenset())  # storages that only its own backward reads

    @property
    def name(self) -> str:
        first, last = self.calls[0], self.calls[-1]
        again = f" (call {first.ordinal + 1})" if first.ordinal else ""
        return (first.path if first is last else f"{first.path} to {last.path}") + again

    @property
    def enter(self) -> int:
        return self.calls[0].enter

    @property
    def leave(self) -> int:
        return self.calls[-1].leave

    @property
    def gradient_in(self) -> int | None:
        return self.calls[-1].gradient_in

    @property
    def gradient_out(self) -> int | None:
        return self.calls[0].gradient_out

    @property
    def given(self) -> tuple[int, ...]:
        return self.calls[0].given


def cuts(profile: BlockProfile) -> list[tuple[Block, ...]]:
    """Ways to take a model apart into blocks with something to drop, from few large ones to many small ones.

    A way is a depth of calls, and how finely sequences of modules at that depth are divided.
    """
    found: dict[tuple[tuple[int, ...], ...], tuple[Block, ...]] = {}
    calls = profile.children.get(None, ())
    while calls:
        for parts in (1, 2, 4, 8, 16, 32):
            blocks = _useful(profile, _grouped(profile, calls, parts))
            key = tuple(tuple(call.id for call in block.calls) for block in blocks)
            if blocks:
                found.setdefault(key, blocks)
        deeper = tuple(c for call in calls for c in (profile.children.get(call.id) or (call,)))
        if deeper == calls:
            break
        calls = deeper
    return list(found.values())


def _grouped(profile: BlockProfile, calls: tuple[ModuleCall, ...], parts: int) -> list[Block]:
    """Calls as blocks: one each, or with more than one part sequences divided evenly by the bytes that they keep."""
    if parts == 1:
        return [Block(calls=(call,)) for call in calls]
    kept = {call.id: _kept_bytes(profile, call) for call in calls}
    most_bytes = sum(kept.values()) / parts
    blocks: list[list[ModuleCall]] = []
    for call in calls:
        last = blocks[-1] if blocks else []
        if last and _follows(last[-1], call) and sum(kept[c.id] for c in (*last, call)) <= most_bytes:
            last.append(call)
        else:
            blocks.append([call])
    return [Block(calls=tuple(block)) for block in blocks]


def _kept_bytes(profile: BlockProfile, call: ModuleCall) -> int:
    span = profile.between(call.enter, call.leave)
    return max(0, span.after_bytes - span.before_bytes)


def _follows(before: ModuleCall, call: ModuleCall) -> bool:
    """Whether two calls are neighbours in one pass through an nn.Sequential."""
    return before.position is not None and before.parent == call.parent and call.position == before.position + 1


def _useful(profile: BlockProfile, blocks: list[Block]) -> tuple[Block, ...]:
    """Blocks that can be run again and have something that only they keep."""
    able = [block for block in blocks if _runs_again(block)]
    handed = {storage for block in able for storage in block.given}
    found = (Block(calls=block.calls, saved=_saved(profile, block) - handed) for block in able)
    return tuple(block for block in found if sum(profile.storages[s].nbytes for s in block.saved))


def _runs_again(block: Block) -> bool:
    return block.gradient_in is not None and not any(call.why_not for call in block.calls)


def _saved(profile: BlockProfile, block: Block) -> frozenset[int]:
    """Storages that nobody but this block keeps for the backward, and that are gone after it."""
    inside = frozenset().union(*(profile.within[call.id] for call in block.calls))
    return frozenset(
        number
        for number, storage in profile.storages.items()
        if storage.savers and storage.savers <= inside and storage.gone is not None
    )
