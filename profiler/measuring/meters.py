"""How time and memory are read off a device: one interface, the CPU and CUDA behind it."""

from __future__ import annotations

import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

T = TypeVar("T")

# The profiler's library writes two lines to the terminal at every use, through progress bars and tables. It reads this
# once, before its first use, and a level that the user has set stays.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes that were live before a call, at its worst moment, and after it; counted from the probe's start."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int


class Stopwatch(Protocol):
    """Times calls one after the other; a call repeated n times counts with its mean."""

    def lap(self, call: Callable[[], T], *, repeats: int = 1) -> T: ...

    def laps_us(self) -> list[float]: ...


class MemoryProbe(Protocol):
    """Watches the allocator during calls, one after the other."""

    def watch(self, call: Callable[[], T]) -> T: ...

    def samples(self) -> list[MemorySample]: ...


class Meter(Protocol):
    """A device that can be measured."""

    @property
    def device(self) -> str: ...

    def stopwatch(self) -> Stopwatch: ...

    def memory_probe(self) -> Any:
        """A context manager that gives a MemoryProbe; its samples are there once it is left."""

    def watch(self) -> Watch | None:
        """Watch the allocator from now on, across whatever the caller does; None where somebody else does already."""


class Watch(Protocol):
    """A look at the allocator that began when it was made."""

    def mark(self) -> None:
        """A new span begins."""

    def end(self) -> list[int]:
        """By how much memory rose at most above what it was at the beginning of each span."""


def meter_for(device: torch.device) -> Meter:
    """The meter of the device that a model lies on."""
    return CudaMeter(torch.cuda, device) if device.type == "cuda" else CpuMeter()


# -- CPU ------------------------------------------------------------------------------------------------------


class CpuMeter:
    """A monotonic clock, and the allocator's own events."""

    @property
    def device(self) -> str:
        threads = torch.get_num_threads()
        return f"{platform.processor() or platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"

    def stopwatch(self) -> CpuStopwatch:
        return CpuStopwatch()

    @contextmanager
    def memory_probe(self) -> Iterator[CpuProbe]:
        with profile(use_cpu=True, use_kineto=True, profile_memory=True) as session:
            probe = CpuProbe()
            yield probe
        probe.read(session.kineto_results.events())

    def watch(self) -> CpuWatch | None:
        return None if torch.autograd._profiler_enabled() else CpuWatch()  # type: ignore[attr-defined]


class CpuWatch:
    """The allocator's events from a beginning to an end that lie in different places of the caller's code.

    It must not end inside of a backward: the engine would put the profiler's state back.
    """

    _MARK = "profiler.watch."

    def __init__(self) -> None:
        self._session = profile(use_cpu=True, use_kineto=True, profile_memory=True)
        self._session.__enter__()  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        with record_function(self._MARK):
            pass

    def end(self) -> list[int]:
        self._session.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        assert self._session.kineto_results is not None
        events = self._session.kineto_results.events()
        marks = sorted(e.start_ns() for e in events if e.name() == self._MARK)
        rises, live, before, span = [0] * (len(marks) + 1), 0, 0, 0
        for moment_ns, nbytes in _changes(events):
            if bisect_right(marks, moment_ns) > span:
                before, span = live, bisect_right(marks, moment_ns)
            live += nbytes
            rises[span] = max(rises[span], live - before)
        return rises


def _changes(events: Any) -> list[tuple[int, int]]:
    """When the allocator gave or took memory, and how much."""
    memory = (e for e in events if e.name() == "[memory]" and e.device_type().name == "CPU")
    return sorted((e.start_ns(), e.nbytes()) for e in memory)


class CpuStopwatch:
    """Wall-clock laps by `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self._laps_ns: list[float] = []

    def lap(self, call: Callable[[], T], *, repeats: int = 1) -> T:
        started = time.perf_counter_ns()
        for _ in range(repeats - 1):
            call()
        result = call()
        self._laps_ns.append((time.perf_counter_ns() - started) / repeats)
        return result

    def laps_us(self) -> list[float]:
        return [ns / 1e3 for ns in self._laps_ns]


class CpuProbe:
    """Marks each call in the profiler's record, and sorts the allocator's events into them afterwards."""

    _MARK = "profiler.probe."

    def __init__(self) -> None:
        self._calls = 0
        self._samples: list[MemorySample] = []

    def watch(self, call: Callable[[], T]) -> T:
        with record_function(f"{self._MARK}{self._calls}"):
            self._calls += 1
            return call()

    def samples(self) -> list[MemorySample]:
        return self._samples

    def read(self, events: Any) -> None:
        """Turn the profiler's events into samples, one per call."""
        changes = _changes(events)
        marks = [e for e in events if e.name().startswith(self._MARK)]
        spans = sorted((int(e.name().removeprefix(self._MARK)), e.start_ns(), e.duration_ns()) for e in marks)
        live = position = 0
        for _, start_ns, duration_ns in spans:
            while position < len(changes) and changes[position][0] < start_ns:
                live += changes[position][1]
                position += 1
            before = peak = live
            while position < len(changes) and changes[position][0] <= start_ns + duration_ns:
                live += changes[position][1]
                peak = max(peak, live)
                position += 1
            self._samples.append(MemorySample(before_bytes=before, peak_bytes=peak, after_bytes=live))


# -- CUDA -----------------------------------------------------------------------------------------------------


class CudaMeter:
    """CUDA events, and the caching allocator's statistics. `api` is torch.cuda, or a stand-in of it in tests."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device

    @property
    def device(self) -> str:
        return str(self._api.get_device_name(self._device))

    def stopwatch(self) -> CudaStopwatch:
        return CudaStopwatch(self._api, self._device)

    @contextmanager
    def memory_probe(self) -> Iterator[CudaProbe]:
        self._api.synchronize(self._device)
        yield CudaProbe(self._api, self._device)

    def watch(self) -> CudaWatch:
        return CudaWatch(self._api, self._device)


class CudaWatch:
    """The allocator's highest mark, read and set back at each mark of ours."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device
        self._before = api.memory_allocated(device)
        self._rises: list[int] = []
        api.reset_peak_memory_stats(device)

    def mark(self) -> None:
        self._rises.append(int(self._api.max_memory_allocated(self._device) - self._before))
        self._before = self._api.memory_allocated(self._device)
        self._api.reset_peak_memory_stats(self._device)

    def end(self) -> list[int]:
        self.mark()
        return self._rises


class CudaStopwatch:
    """A pair of events around each lap, on the current stream; read once, at the end."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device
        self._laps: list[tuple[Any, Any, int]] = []

    def lap(self, call: Callable[[], T], *, repeats: int = 1) -> T:
        start, end = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        start.record()
        for _ in range(repeats - 1):
            call()
        result = call()
        end.record()
        self._laps.append((start, end, repeats))
        return result

    def laps_us(self) -> list[float]:
        self._api.synchronize(self._device)
        return [1e3 * start.elapsed_time(end) / repeats for start, end, repeats in self._laps]


class CudaProbe:
    """The allocator's counters before, during and after each call; they are kept on the host, in order."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device
        self._start = api.memory_allocated(device)
        self._samples: list[MemorySample] = []

    def watch(self, call: Callable[[], T]) -> T:
        before = self._api.memory_allocated(self._device)
        self._api.reset_peak_memory_stats(self._device)
        result = call()
        peak, after = self._api.max_memory_allocated(self._device), self._api.memory_allocated(self._device)
        start = self._start
        self._samples.append(
            MemorySample(before_bytes=before - start, peak_bytes=peak - start, after_bytes=after - start)
        )
        return result

    def samples(self) -> list[MemorySample]:
        return self._samples


def peak_above_start(meter: Meter, call: Callable[[], Any]) -> int:
    """The most memory that `call` had in use at any moment beyond what was live before it."""
    with meter.memory_probe() as probe:
        probe.watch(call)
    (sample,) = probe.samples()
    return int(sample.peak_bytes - sample.before_bytes)
