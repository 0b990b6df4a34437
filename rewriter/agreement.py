"""Between ranks: what all of them must have in common before they go on, and an error of one that is an error of all.

Ranks that run another sequence of collectives than the others hang, or add up what does not belong together. So they
speak to each other through the store of their process group after every stage, and never through its collectives: one
that fails half-way through a stage would leave those in disorder.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlannerError
from planner.ir import Graph
from profiler.collectives import digest
from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks.tensor_parallel import group_of
from profiler.workload import device_of

log = logging.getLogger("recompute_planner")

T = TypeVar("T")


class RankError(PlannerError):
    """Ranks that train together do not agree, or one of them failed or stayed away; every rank is told."""


def _shared(error: PlannerError) -> PlannerError:
    """The error, marked as one that every rank raises at this point, so that nobody has to be told of it."""
    error.is_shared = True  # type: ignore[attr-defined]
    return error


class Ranks(Protocol):
    """Those that train together, as one of them sees it."""

    rank: int
    size: int

    def together(self, stage: str) -> Any:
        """A context: an error inside it, on any rank, is an error of all at its end."""
        ...

    def gathered(self, stage: str, mine: T) -> list[T]:
        """What every rank has, in their order."""
        ...

    def fits_all(self, mine: Sequence[bool]) -> list[bool]:
        """Which of several things hold on every rank; asked before each step."""
        ...

    def watched(self) -> Any:
        """A context in which a collective that fails says so in a sentence."""
        ...


class Alone:
    """A process that trains by itself."""

    rank = 0
    size = 1

    @contextmanager
    def together(self, stage: str) -> Iterator[None]:
        """Nobody else is there."""
        yield

    def gathered(self, stage: str, mine: T) -> list[T]:
        """Its own."""
        return [mine]

    def fits_all(self, mine: Sequence[bool]) -> list[bool]:
        """Its own."""
        return list(mine)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing communicates."""
        yield


ALONE = Alone()


def ranks_of(model: nn.Module, group: Any = None) -> Ranks:
    """The ranks of a group, or those that a model's wrapper communicates with."""
    if group is None and not private.has_group():
        return ALONE
    group = group_of(model) if group is None else group
    if group is None or dist.get_world_size(group) == 1 or private.is_fake(group):
        return ALONE
    return Group(group, device_of(model))


def agree(ranks: Ranks, what: str, words: object, *, otherwise: str) -> None:
    """RankError on every rank where `words`, plain data, are not equal on all of them."""
    mine = digest(words)
    seen = ranks.gathered(f"comparing {what}", mine)
    odd = [rank for rank, one in enumerate(seen) if one != seen[0]]
    if odd:
        named = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
        raise RankError(f"{what} of {named} differs from rank 0's: {otherwise}")


def agree_on_parameters(ranks: Ranks, model: nn.Module) -> None:
    """RankError on every rank where the parameters of a plain model are not equal on all of them."""
    sums = [] if ranks.size == 1 else [_bits_of(param.detach()) for param in model.parameters()]
    agree(ranks, "the set of parameters", sums, otherwise=SAME_VALUES)


SAME_VALUES = (
    "ranks that average gradients train one model, so begin with one: seed them alike, or send rank 0's parameters "
    "with torch.distributed.broadcast"
)

_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_of(tensor: torch.Tensor) -> int:
    """A number that is another for other bits, almost always."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.contiguous().view(_WHOLE_NUMBERS[tensor.element_size()]).flatten().to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * (2 * places + 1)).sum())


# -- a process group ------------------------------------------------------------------------------------------------

_POLL_S = 0.002
_LONGEST_POLL_S = 0.05

_stages: Counter[str] = Counter()  # how many stages the ranks of a group have gone through, by its name


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way to the other ranks."""

    kind: type[PlannerError]
    words: str

    @staticmethod
    def of(error: BaseException, stage: str, rank: int) -> _Failure:
        first = str(error).strip() or "no message"
        kind: type[PlannerError] = RankError
        if isinstance(error, PlannerError) and type(error).__init__ is PlannerError.__init__:
            kind = type(error)  # which takes a message and nothing else
        return _Failure(kind, f"{stage} failed on rank {rank}: {type(error).__name__}: {first}")


class Group:
    """The ranks of a process group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._device = device
        self._name = str(group.group_name)
        self._store = private.store_of(group)
        self._timeout_s = private.timeout_s(group, device)

    # -- stages -------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, stage: str) -> Iterator[None]:
        """An error inside, on any rank, is an error of all at the end; the one whose own it is raises it as it is."""
        try:
            yield
        except BaseException as error:  # an interrupt of one rank too
            if not getattr(error, "is_shared", False):
                self._fail(stage, error)
            raise
        self._exchange(stage, None)

    def gathered(self, stage: str, mine: T) -> list[T]:
        """What every rank has, in their order; RankError where one of them is elsewhere or stays away."""
        return self._exchange(stage, mine)

    def _fail(self, stage: str, error: BaseException) -> None:
        """Leave the error for the others, without waiting for them; raises theirs where this one followed from it."""
        number = self._next()
        try:
            if _is_of_a_collective(error):
                self._raise_told(number)
            self._store.set(self._key(number, "failure"), pickle.dumps(_Failure.of(error, stage, self.rank)))
        except dist.DistError as lost:
            log.warning("the other ranks could not be told of the error on rank %d: %s", self.rank, lost)

    def _exchange(self, stage: str, mine: T) -> list[T]:
        number = self._next()
        keys = [self._key(number, str(rank)) for rank in range(self.size)]
        try:
            self._store.set(keys[self.rank], pickle.dumps((stage, mine)))
            self._wait_for(stage, number, keys)
            seen = [pickle.loads(one) for one in self._store.multi_get(keys)]
            if number > 1:  # everybody has read it, since everybody is here
                self._store.delete_key(self._key(number - 1, str(self.rank)))
        except dist.DistError as error:
            raise RankError(
                f"{stage} on rank {self.rank}: the other ranks cannot be reached any more: one of them has ended; see "
                "what it says"
            ) from error
        self._check_stages([name for name, _ in seen])
        return [one for _, one in seen]

    def _next(self) -> int:
        _stages[self._name] += 1
        return _stages[self._name]

    def _key(self, number: int, who: str) -> str:
        return f"recompute_planner/{number}/{who}"

    def _wait_for(self, stage: str, number: int, keys: list[str]) -> None:
        deadline, pause_s = time.monotonic() + self._timeout_s, _POLL_S
        while not self._store.check(keys):
            self._raise_told(number)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise _shared(
                    RankError(
                        f"{stage}: rank {', '.join(map(str, missing))} did not come within the group's time-out of "
                        f"{self._timeout_s:.0f} s; it has ended or does something else: call checkpoint() and the "
                        "planned step on every rank, in the same order"
                    )
                )
            time.sleep(pause_s)
            pause_s = min(_LONGEST_POLL_S, 2 * pause_s)

    def _raise_told(self, number: int) -> None:
        key = self._key(number, "failure")
        if self._store.check([key]):
            failure: _Failure = pickle.loads(self._store.get(key))
            raise _shared(failure.kind(failure.words))

    def _check_stages(self, stages: list[str]) -> None:
        other = next((rank for rank, stage in enumerate(stages) if stage != stages[0]), None)
        if other is not None:
            raise _shared(
                RankError(
                    f"rank 0 is at {stages[0]!r} and rank {other} at {stages[other]!r}: call checkpoint() and the "
                    "planned step on every rank, in the same order"
                )
            )

    # -- steps --------------------------------------------------------------------------------------------------

    def fits_all(self, mine: Sequence[bool]) -> list[bool]:
        """Which hold on every rank: one small all-reduce, before the step's own collectives."""
        flags = torch.tensor([int(one) for one in mine], dtype=torch.int32, device=self._device)
        with self.watched():
            dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._group)
        return [bool(one) for one in flags.tolist()]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """RankError for a collective that failed inside: gloo and NCCL tell of sockets, not of ranks."""
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_collective(error):
                raise
            raise RankError(
                f"rank {self.rank} was left alone in the middle of a step: {self._why(error)}. Some of this step may "
                "have been done: start again from the last saved state"
            ) from error

    def _why(self, error: BaseException) -> str:
        """What a backend's words about sockets mean for ranks; its own are the error's cause."""
        words, late = str(error).lower(), f"did not come within the group's time-out of {self._timeout_s:.0f} s"
        if any(sign in words for sign in _ENDED):
            return "another rank has ended; see what it says"
        if any(sign in words for sign in _LATE):
            return f"another rank {late}"
        return f"another rank has ended, or {late}"


_ENDED = ("connection closed", "connection reset", "connection refused", "broken pipe")
_LATE = ("timed out", "timeout")
_SIGNS = ("gloo", "nccl", "processgroup", *_ENDED, *_LATE)


def _is_of_a_collective(error: BaseException) -> bool:
    if isinstance(error, (dist.DistError, RankError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


# -- one plan for all -------------------------------------------------------------------------------------------------


def structure(graph: Graph) -> list[Any]:
    """What the graphs of all ranks must have in common: all but sizes, which follow from each rank's batch and shards.

    So that one plan means the same steps, and the same collectives, on every rank.
    """
    return [
        [(o.name, o.target, o.phase.value, o.round, o.inputs, o.outputs, o.mutates, o.rerun.value) for o in graph.ops],
        [(v.storage, v.producer, v.base, v.dtype) for v in graph.values],
        [s.role.value for s in graph.storages],
        graph.outputs,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What each rank measured for itself: time and workspace of every op, size of every storage."""

    time_us: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    nbytes: tuple[int, ...]

    @staticmethod
    def of(graph: Graph) -> Figures:
        """The figures of a measured graph."""
        return Figures(
            time_us=tuple(op.time_us for op in graph.ops),
            workspace_bytes=tuple(op.workspace_bytes for op in graph.ops),
            nbytes=tuple(storage.nbytes for storage in graph.storages),
        )


def slowest(graph: Graph, figures: Sequence[Figures]) -> Graph:
    """One rank's graph with the times of the slowest rank, op by op: the others wait for it."""
    return graph.with_times(tuple(map(max, *(one.time_us for one in figures))), timing=graph.timing)


def largest(graph: Graph, figures: Sequence[Figures]) -> Graph:
    """A graph that no rank's exceeds in any size: what fits it fits every rank."""
    workspaces = tuple(map(max, *(one.workspace_bytes for one in figures)))
    sizes = tuple(map(max, *(one.nbytes for one in figures)))
    ops = tuple(replace(op, workspace_bytes=w) for op, w in zip(graph.ops, workspaces, strict=True))
    storages = tuple(replace(s, nbytes=nbytes) for s, nbytes in zip(graph.storages, sizes, strict=True))
    return replace(graph, ops=ops, storages=storages).validate()
