"""How much memory a device can still give, and what happens where it gives out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DistributedDataParallel

from planner.allocator import Allocator
from planner.errors import PlannerError
from profiler.backend import backend_for, free_caches
from profiler.measuring.handed_out import handed_out_bytes
from profiler.tracing.ranks.torch_distributed import bucket_bytes, local

T = TypeVar("T")

# How the CPU's allocator says it; it raises a plain RuntimeError.
_CPU_WORDS = ("can't allocate memory", "not enough memory")


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


class OutOfMemory(PlannerError):  # noqa: N818 - an answer, not a fault
    """The machine's memory was not enough for a step, or would not be."""


def guarded(what: str, call: Callable[[], T]) -> T:
    """`call()`; OutOfMemory that says during `what` if memory runs out, with everything it held let go."""
    said = ""
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # Outside of the handler, where the error no longer holds the frames and their tensors.
    gc.collect()
    free_caches()
    raise OutOfMemory(f"out of memory while {what}: {said}")


def available_bytes(device: torch.device, api: Any = None, *, root: Path = Path("/")) -> int:
    """What can still be allocated there: on a GPU free and cached memory, on the CPU what the system would give.

    `api` is a stand-in of torch.cuda in tests; `root` is where the system's files are.
    """
    return backend_for(device, api, root=root).available_bytes()


def allocator_of(device: torch.device, api: Any = None) -> Allocator | None:
    """Who hands out the device's memory, where it is one that can be simulated; on the CPU nobody holds what is freed.

    `api` is a stand-in of torch.cuda in tests.
    """
    return backend_for(device, api).allocator()


# A process needs more than its tensors, and workspaces are not known before they are measured: this share of what is
# available stays out of reach. On the CPU, who takes the last of it is killed without a word.
HEADROOM = 0.15


def usable_bytes(device: torch.device) -> int:
    """What may be taken of the memory that is available there."""
    return int((1 - HEADROOM) * available_bytes(device))


def live_bytes(
    device: torch.device, *, without: Iterable[Tensor], without_memory: Collection[int] = (), api: Any = None
) -> int:
    """What tensors hold on a device now, those that share memory with `without` left out.

    On the CPU, where no allocator tells, every tensor that Python knows of is counted, but for those whose storages are
    `without_memory`; and the buckets of DistributedDataParallel, which it does not know of.
    """
    parts = [local(t) for t in without if t.layout == torch.strided]
    known: dict[int, int] = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    counted = backend_for(device, api).allocated_bytes()
    if counted is not None:
        return counted - sum(known.values())
    seen: dict[int, int] = {}
    buckets = 0
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and type(found).__module__.partition(".")[0] == "torch":
            _count(found, device, seen)
        elif issubclass(type(found), DistributedDataParallel):
            buckets += bucket_bytes(found, device)
    return buckets + sum(nbytes for key, nbytes in seen.items() if key not in known and key not in without_memory)


def allocation_mark(device: torch.device, api: Any = None) -> int | None:
    """A number that grows by what tensors on a device grow by, if not by more, and is cheap; None where nobody tells.

    `api` is a stand-in of torch.cuda in tests.
    """
    counted = backend_for(device, api).allocated_bytes()
    return handed_out_bytes() if counted is None else counted


def _count(tensor: Tensor, device: torch.device, seen: dict[int, int]) -> None:
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided or tensor.device != device:
        return
    storage = local(tensor).untyped_storage()  # of a distributed tensor what is here
    seen[storage._cdata] = storage.nbytes()
