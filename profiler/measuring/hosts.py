"""Where tensors are moved while they idle: a file for the CPU's own memory, pinned memory for a GPU's.

A move has four parts, those of the schedule: `send` begins a copy out, `away` waits for it and lets go of the tensors,
`fetch` takes memory again and begins the copy back, `back` waits for that and gives the tensors, views as views.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from planner.errors import PlannerError
from planner.units import human_bytes
from profiler.backend import is_accelerator
from profiler.backend.cuda import CudaBackend


class HostError(PlannerError):
    """Tensors that cannot be moved to the host: no such folder, no room, or a copy that failed."""


@dataclass(frozen=True, slots=True)
class View:
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @staticmethod
    def of(tensor: Tensor) -> View:
        return View(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def of_bytes(self, memory: Tensor) -> Tensor:
        """The same view of other memory."""
        made = torch.empty(0, dtype=self.dtype, device=memory.device)
        made.set_(memory.untyped_storage(), self.offset, self.size, self.stride)
        made = torch._conj(made) if self.conjugated else made
        return torch._neg_view(made) if self.negated else made


def all_bytes(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor, as bytes."""
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(tensor.untyped_storage())


# What a copy of so many bytes waits for where it runs: how slow links are made.
BeforeCopy = Callable[[int], None] | None


class Copying(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Go on when it is done; HostError if it failed."""
        ...

    def let_go(self) -> None:
        """Nobody will wait for it: make sure that its memory is not used for something else before it is done."""
        ...


class Host(Protocol):
    """The memory beside a device: buffers of it, and copies into and out of them."""

    budget_bytes: int | None  # of all buffers together, those that are free among them

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for so many buffers at a time, before anything runs; HostError if there is none."""
        ...

    def take(self, nbytes: int) -> Any:
        """A buffer of that size, until it is given back."""
        ...

    def give_back(self, buffer: Any) -> None: ...

    def copy_out(self, memory: Tensor, buffer: Any) -> Copying: ...

    def copy_in(self, buffer: Any, memory: Tensor) -> Copying: ...


# -- one move ---------------------------------------------------------------------------------------------------------


class Move:
    """One storage on its way to the host and back.

    Its buffer is given back with the move itself: who goes backward twice fetches it twice.
    """

    _held: Tensor | None = None  # here, since an interrupt may come before the first line of __init__
    _buffer: Any = None

    def __init__(self, host: Host, tensor: Tensor) -> None:
        self._host = host
        self._nbytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        self._buffer = host.take(self._nbytes)
        memory = all_bytes(tensor)
        self._copy = host.copy_out(memory, self._buffer)
        self._held = memory
        self._views: tuple[View, ...] = ()

    def __del__(self) -> None:
        if self._held is not None:  # a step was broken off
            self._copy.let_go()
        if self._buffer is not None:
            self._host.give_back(self._buffer)

    def away(self, tensors: Sequence[Tensor]) -> None:
        """Wait for the copy out; from here on only the buffer has what `tensors` are views of."""
        self._copy.wait()
        self._views = tuple(View.of(tensor) for tensor in tensors)
        self._held = None

    def fetch(self) -> None:
        """Take memory again and begin the copy back."""
        memory = torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)
        self._copy = self._host.copy_in(self._buffer, memory)
        self._held = memory

    def back(self) -> tuple[Tensor, ...]:
        """Wait for the copy back, and give the tensors that went."""
        if self._held is None:  # for a second time
            self.fetch()
        self._copy.wait()
        memory, self._held = self._held, None
        assert memory is not None
        return tuple(view.of_bytes(memory) for view in self._views)


class Buffers:
    """Buffers that are used again from step to step; those of other sizes go where the budget has no room for all."""

    budget_bytes: int | None = None

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = {}
        self._there_bytes = 0

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make them now, as many as the budget allows at a time; a plan within it needs no more at any time."""
        buffers: list[Any] = []
        left = self.budget_bytes
        try:
            for nbytes in sizes:
                if left is None or nbytes <= left:
                    buffers.append(self.take(nbytes))
                    left = None if left is None else left - nbytes
        finally:
            for buffer in buffers:
                self.give_back(buffer)

    def take(self, nbytes: int) -> Any:
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        self._make_room(nbytes)
        buffer = self._new(nbytes)
        self._there_bytes += nbytes
        return buffer

    def give_back(self, buffer: Any) -> None:
        self._free.setdefault(self._size(buffer), []).append(buffer)

    def _make_room(self, nbytes: int) -> None:
        while self.budget_bytes is not None and self._there_bytes + nbytes > self.budget_bytes:
            size = next((size for size, free in self._free.items() if free), None)
            if size is None:
                raise HostError(
                    f"{human_bytes(self._there_bytes)} are on the host and {human_bytes(nbytes)} more would be moved "
                    f"there, over its budget of {human_bytes(self.budget_bytes)}: more forwards are alive than were "
                    "when this was planned; go backward from some of them first, or raise host_budget"
                )
            self._let_go(self._free[size].pop())
            self._there_bytes -= size

    def _new(self, nbytes: int) -> Any:
        raise NotImplementedError

    def _size(self, buffer: Any) -> int:
        raise NotImplementedError

    def _let_go(self, buffer: Any) -> None:
        """Nobody will use it again."""


# -- the CPU's memory: files ------------------------------------------------------------------------------------------


class FileHost(Buffers):
    """Files without names in a folder, written and read at once; one worker for each direction.

    They are not mapped into memory: a copy through a mapping faults at every page of it, takes six times the time out
    of a processor, and a step then waits for what a measurement of the same copies beforehand does not show.

    A file that has no name is gone when the process is, however it ends; they are closed when nobody holds the host
    any more. Their room on the disk is taken beforehand, so that a full disk is told before a step begins.
    """

    def __init__(self, folder: str | Path, *, before_copy: BeforeCopy = None) -> None:
        super().__init__()
        self.folder, self._before_copy = Path(folder), before_copy
        if not self.folder.is_dir():
            raise HostError(f"{folder}: there is no such folder to move tensors to; make it, or name another")
        self._process = os.getpid()
        self.waited_s = 0.0  # by whoever needed a copy to be done, since this host was made
        self._files: list[Any] = []
        weakref.finalize(self, _close_all, self._files)
        self._out = ThreadPoolExecutor(1, thread_name_prefix="copy-out")
        self._in = ThreadPoolExecutor(1, thread_name_prefix="copy-in")

    def take(self, nbytes: int) -> Any:
        if os.getpid() != self._process:  # where there are no workers, and the files are another's
            raise HostError(
                f"{self.folder}: this process was forked from the one that planned, which moves tensors to the same "
                "files: plan in this process"
            )
        return super().take(nbytes)

    def give_back(self, buffer: Any) -> None:
        if not buffer.closed:  # as it is where a move and its host go at once
            super().give_back(buffer)

    def _size(self, buffer: Any) -> int:
        return os.fstat(buffer.fileno()).st_size

    def _let_go(self, buffer: Any) -> None:
        self._files.remove(buffer)
        self._out.submit(buffer.close).result()  # after what a step that was broken off still writes to it

    def _new(self, nbytes: int) -> Any:
        try:
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - it lives as long as its tensor
        except OSError as error:
            raise HostError(f"{self.folder}: no file can be made there: {error.strerror or error}") from error
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            file.close()
            what = "no room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error.strerror)
            raise HostError(
                f"{self.folder}: {what} for {human_bytes(nbytes)} that is moved there: free some, name another "
                "folder (offload_dir), or bound what is moved (host_budget)"
            ) from error
        self._files.append(file)
        return file

    def copy_out(self, memory: Tensor, buffer: Any) -> Copying:
        return _Task(self._out.submit(_copy, _written, [memory], buffer, self._before_copy), self)

    def copy_in(self, buffer: Any, memory: Tensor) -> Copying:
        return _Task(self._in.submit(_copy, _read, [memory], buffer, self._before_copy), self)


def _close_all(files: list[Any]) -> None:
    """Moves hold their host, so that nobody is left to use them; a copy under way has its own hold on its file."""
    for file in files:
        file.close()


class _Task:
    def __init__(self, future: Future[None], host: FileHost) -> None:
        self._future, self._host = future, host

    def wait(self) -> None:
        is_late = not self._future.done()  # else it is asked, and not waited for: some microseconds a copy
        started = time.perf_counter()
        try:
            self._future.result()
        except OSError as error:
            raise HostError(
                f"{self._host.folder}: a copy of a tensor failed half-way through a step: {error}; go on from a saved "
                "state"
            ) from error
        finally:
            if is_late:
                self._host.waited_s += time.perf_counter() - started

    def let_go(self) -> None:
        """The worker itself holds what it copies."""


def _copy(how: Callable[[int, memoryview, int], int], handed: list[Tensor], buffer: Any, before: BeforeCopy) -> None:
    """The system's copies do not hold up Python, and keep to their thread: torch's would start threads of their own.

    The tensor is taken out of `handed`, so that the worker holds nothing of it once the copy counts as done: memory is
    let go of where the schedule says, by the thread that runs it.
    """
    memory = handed.pop()
    if before is not None:
        before(memory.numel())
    left, done = memory.numpy().data, 0
    while left:  # a call copies up to 2 GiB
        copied = how(buffer.fileno(), left, done)
        if not copied:
            raise OSError(f"the file ends after {done} of {memory.numel()} bytes")
        left, done = left[copied:], done + copied


def _written(file: int, memory: memoryview, at: int) -> int:
    return os.pwrite(file, memory, at)


def _read(file: int, memory: memoryview, at: int) -> int:
    return os.preadv(file, [memory], at)


# -- a GPU's memory: pinned buffers -----------------------------------------------------------------------------------


class CudaHost(Buffers):
    """Pinned buffers, used again from step to step, and a stream for each direction. `api` is torch.cuda.

    Every copy is waited for by the device's own stream before its memory is let go of, also in a step that is broken
    off. So there is no need for `record_stream`, after which the allocator would hold memory for as long as a copy
    lasts, and bytes would hang on times.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda, *, before_copy: BeforeCopy = None) -> None:
        super().__init__()
        self._api, self._device, self._before_copy = api, device, before_copy
        self._out, self._in = CudaBackend(device, api).copy_streams()

    def _new(self, nbytes: int) -> _Pinned:
        try:
            return _Pinned(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._api.is_available()))
        except RuntimeError as error:
            raise HostError(f"no pinned memory for {human_bytes(nbytes)} that the plan moves: {error}") from error

    def _size(self, buffer: _Pinned) -> int:
        return buffer.memory.numel()

    def copy_out(self, memory: Tensor, buffer: _Pinned) -> Copying:
        """After all that was asked of the device so far, and after the copy that last read the buffer."""
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
        return self._copied(self._out, memory, buffer.memory)

    def copy_in(self, buffer: _Pinned, memory: Tensor) -> Copying:
        copying = self._copied(self._in, buffer.memory, memory)
        buffer.read = copying.event
        return copying

    def _copied(self, stream: Any, source: Tensor, target: Tensor) -> _Recorded:
        if self._device.type not in (source.device.type, target.device.type):
            # A few bytes of a step on a GPU lie in main memory.
            target.copy_(source)
            return _Recorded(None, None)
        stream.wait_stream(self._api.current_stream(self._device))
        with self._api.stream(stream):
            if self._before_copy is not None:
                self._before_copy(source.numel())
            target.copy_(source, non_blocking=True)
            event = self._api.Event()
            event.record(stream)
        return _Recorded(event, self._api.current_stream(self._device))


@dataclass(slots=True)
class _Pinned:
    memory: Tensor
    read: Any = None  # the event after which its last copy back was done


@dataclass(frozen=True, slots=True)
class _Recorded:
    event: Any
    stream: Any

    def wait(self) -> None:
        """The device's own stream goes on after the event; the host does not wait."""
        if self.event is not None:
            self.stream.wait_event(self.event)

    def let_go(self) -> None:
        """The memory goes back to the device's own stream, which uses it after the event only."""
        self.wait()


def host_for(device: torch.device, folder: str | Path | None, *, before_copy: BeforeCopy = None) -> Host:
    """The host of a device; HostError where a CPU's has no folder. `before_copy` is called where each copy runs."""
    if is_accelerator(device):
        return CudaHost(device, getattr(torch, device.type), before_copy=before_copy)
    if folder is None:
        raise HostError(
            "on a CPU tensors are moved to files: say in which folder with offload_dir, or leave host_link out"
        )
    return FileHost(folder, before_copy=before_copy)
