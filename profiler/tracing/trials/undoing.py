"""Running the user's own code for a trial: what it changes is noted just before, and put back when the trial ends.

A trial is opened where a step is measured, audited or proven. Whoever calls the user's code inside it (an eager step,
an optimizer that runs as itself) does so under `watched`; outside of a trial that is nothing.

An optimizer that runs as itself is undone and not copied: a copy would take its state a second time, and yet not be
apart. Its hooks, what it wraps and whoever counts its steps (an average, a scheduler) go on pointing to the objects of
the user, and of many optimizers no copy can be made at all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import CaptureError
from profiler.tracing.guards import Reach, cannot_be_put_back, learning
from profiler.tracing.ranks.torch_distributed import local

# Written to by normalizations whose schemas do not say so.
_HIDDEN_WRITES = ("running_mean", "running_var")


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves the memory that an op is about to write to, once, and the states of generators before they are drawn from.

    The copies are not made by torch's allocators, so that no meter counts them. `known` is memory that somebody else
    looks after, by its address.
    """

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set(known)
        self._saved: list[tuple[torch.UntypedStorage, bytes]] = []
        # What was written to, the same memory under its shape, and how often it had been written to.
        self._shaped: list[tuple[Tensor, Tensor, int]] = []
        self._generators: dict[torch.Generator, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (Tensor, torch.Generator))]
        self._note_generators(given)
        for tensor in _written(func, args, kwargs):
            self._save(tensor)
        made = func(*args, **kwargs)
        before = {_address(one) for one in given if isinstance(one, Tensor)}
        fresh = {_address(leaf) for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)}
        self._known |= fresh - before  # made inside: nobody's before
        return made

    def _note_generators(self, given: list[Any]) -> None:
        for one in given:
            if isinstance(one, torch.Generator) and one not in self._generators:
                self._generators[one] = one.get_state()

    def _save(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or _address(tensor) in self._known:
            return
        self._known.add(_address(tensor))
        self._saved.append((tensor.untyped_storage(), _content(tensor.untyped_storage())))
        version = 0 if tensor.is_inference() else tensor._version
        self._shaped.append((tensor, tensor.detach(), version))

    def put_back(self) -> None:
        """Everything that was written to or drawn from, as it was; each whatever becomes of the others."""
        with ExitStack() as restoring:
            for generator, state in self._generators.items():
                restoring.callback(generator.set_state, state)
            for storage, content in self._saved:
                restoring.callback(_fill, storage, content)
            for tensor, alias, version in self._shaped:
                if not tensor.is_inference():
                    restoring.callback(torch._C._autograd._unsafe_set_version_counter, (tensor,), (version,))
                if not has_memory_of(tensor, alias):
                    restoring.callback(give_memory_of, tensor, alias)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for i, formal in enumerate(func._schema.arguments):
        if not (formal.alias_info is not None and formal.alias_info.is_write) and formal.name not in _HIDDEN_WRITES:
            continue
        value = args[i] if i < len(args) else kwargs.get(formal.name)
        yield from (local(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _content(storage: torch.UntypedStorage) -> bytes:
    # Not through numpy: it would forbid the user to resize the memory ever after.
    held = storage if storage.device.type == "cpu" else storage.cpu()  # type: ignore[no-untyped-call]
    return ctypes.string_at(held.data_ptr(), held.nbytes())


def _fill(storage: torch.UntypedStorage, content: bytes) -> None:
    if storage.nbytes() != len(content):
        storage.resize_(len(content))
    if storage.device.type == "cpu":
        ctypes.memmove(storage.data_ptr(), content, len(content))
    elif content:
        storage.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage())


def _address(tensor: Tensor) -> int:
    part = local(tensor)
    return part.untyped_storage()._cdata if part.layout == torch.strided else id(tensor)


# -- the shape of a tensor's memory -------------------------------------------------------------------------------


def has_memory_of(tensor: Tensor, alias: Tensor) -> bool:
    """Whether a tensor lies where `alias` does, in the same shape."""
    return (
        tensor.dtype == alias.dtype
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and _extent_bytes(alias) <= alias.untyped_storage().nbytes()
    )


def give_memory_of(tensor: Tensor, alias: Tensor) -> None:
    """Make a tensor lie where `alias` does."""
    storage, needed = alias.untyped_storage(), _extent_bytes(alias)
    if storage.nbytes() < needed:  # the step shrank it (`resize_`)
        storage.resize_(needed)
    tensor.data = alias


def _extent_bytes(tensor: Tensor) -> int:
    """How far into its storage a tensor reaches."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


# -- a trial ------------------------------------------------------------------------------------------------------


class Trial:
    """What the user's code changes between the beginning and the end of a trial."""

    def __init__(self, step: Any, model: nn.Module, optimizer: Optimizer, *, known: Collection[int]) -> None:
        self._reach = Reach(step, model, optimizer, whole_optimizer=True)
        self._writes = Writes(known)
        self._is_on = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The user's code runs inside."""
        if self._is_on:
            yield
            return
        self._is_on = True
        try:
            with learning(self._reach), self._writes:
                yield
        finally:
            self._is_on = False

    def put_back(self) -> None:
        """Everything as it was; CaptureError names what takes nothing back."""
        try:
            self._writes.put_back()
        finally:
            stubborn = self._reach.trials.put_back()
        if stubborn:
            raise CaptureError(cannot_be_put_back(stubborn))


_TRIAL: ContextVar[Trial | None] = ContextVar("trial", default=None)


@contextmanager
def undone(step: Any, model: nn.Module, optimizer: Optimizer, *, known: Collection[int] = ()) -> Iterator[None]:
    """Inside, whatever the user's code does under `watched` is undone at the end."""
    opened = Trial(step, model, optimizer, known=known)
    token = _TRIAL.set(opened)
    try:
        yield
    finally:
        _TRIAL.reset(token)
        opened.put_back()


def watched() -> AbstractContextManager[None]:
    """Where the user's code is called: nothing, unless this is a trial."""
    opened = _TRIAL.get()
    return nullcontext() if opened is None else opened.watching()
