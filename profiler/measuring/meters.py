"""How time and memory are read off a device: one interface, the CPU and CUDA behind it."""

from __future__ import annotations

import gc
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

from profiler.backend import backend_for

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What lies between two marks of a watch: bytes as in a sample, and how long it took."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int
    time_us: float


def _rises(spans: list[Span]) -> list[int]:
    return [span.peak_bytes - span.before_bytes for span in spans]


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

    is_cut: bool  # whether it has ended where no other may begin at once

    def mark(self) -> None:
        """A new span begins."""

    def end(self) -> list[int]:
        """By how much memory rose at most above what it was at the beginning of each span."""

    def spans(self) -> list[Span]:
        """The same end, with all that is known of each span; bytes are counted from when the watch was made."""


def _collect_garbage() -> None:
    """What only cycles hold would go whenever Python happens to look, and count as given back by the call watched."""
    gc.collect()


def meter_for(device: torch.device) -> Meter:
    """The meter of the device that a model lies on."""
    return backend_for(device).meter()


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
        _close_left_open()
        _collect_garbage()
        with profile(use_cpu=True, use_kineto=True, profile_memory=True) as session:
            probe = CpuProbe()
            yield probe
        probe.read(session.kineto_results.events())

    def watch(self) -> CpuWatch | None:
        if threading.current_thread() is not threading.main_thread():
            return None  # a profiler is its thread's, and one that ends takes no leave
        _close_left_open()
        if torch.autograd._profiler_enabled() or is_inside_of_a_cut():  # type: ignore[attr-defined]
            return None
        return CpuWatch()


_open: list[CpuWatch] = []  # at most one
_left_open: list[CpuWatch] = []  # watches of the main thread that another one wanted to end


def is_watched_elsewhere() -> bool:
    """Whether a watch of the main thread is open, and this is another: a profiler that began here would end it all."""
    return bool(_open) and threading.current_thread() is not threading.main_thread()


def _close_left_open() -> None:
    """End them, in the thread whose they are."""
    while _left_open and threading.current_thread() is threading.main_thread():
        _left_open.pop().spans()


class _Cut:
    """Hangs on the frame of the outermost call of Dynamo's in which a watch was cut, and goes with it.

    A frame takes no weak reference, and to hold it would hold its tensors; what it may hold itself is a tracer.
    """

    def __call__(self, *_: Any) -> _Cut:
        return self  # a tracer that traces nothing

    @classmethod
    def here(cls) -> weakref.ref[_Cut] | None:
        """In the outermost call on the stack, if there is one."""
        frame: FrameType | None = sys._getframe()
        outermost = None
        while frame is not None:
            if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
                outermost = frame
            frame = frame.f_back
        if outermost is None:
            return None
        cut = cls()
        outermost.f_trace = cut
        return weakref.ref(cut)


_cut: weakref.ref[_Cut] | None = None  # the last one


def is_inside_of_a_cut() -> bool:
    """Whether a call of Dynamo's has yet to end inside of which a watch has: no other may begin until then."""
    return _cut is not None and _cut() is not None


class CpuWatch:
    """The allocator's events from a beginning to an end that lie in different places of the caller's code.

    It must not end inside of a backward: the engine would put the profiler's state back. Where it ends inside of a
    record that began under it (Dynamo puts one around each call of what it compiled), the end of that record is written
    to memory that is freed by then, if a profiler runs at that moment: so no other watch begins before that call is
    left. A probe may: it ends where it began.
    """

    _MARK = "profiler.watch."
    _END = "profiler.watch_ends"

    def __init__(self) -> None:
        self.is_cut = False
        self._session = profile(use_cpu=True, use_kineto=True, profile_memory=True)
        self._session.__enter__()  # type: ignore[no-untyped-call]
        _open.append(self)
        self._began_ns = time.time_ns()

    def mark(self) -> None:
        with record_function(self._MARK):
            pass

    def end(self) -> list[int]:
        return _rises(self.spans())

    def spans(self) -> list[Span]:
        global _cut
        if threading.current_thread() is not threading.main_thread():
            _left_open.append(self)
            return []
        ended_ns = time.time_ns()  # the clock of the profiler's events
        with record_function(self._END):
            pass
        self._session.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _open.clear()
        assert self._session.kineto_results is not None
        events = self._session.kineto_results.events()
        ends = [e for e in events if e.name() == self._END]
        if not ends:  # somebody else's profiler began and ended meanwhile, and took this one's record with it
            _cut = _Cut.here()  # nothing tells whether it was
            return []
        self.is_cut = any(e.start_ns() < ends[0].start_ns() and e.end_ns() > ends[0].end_ns() for e in events)
        if self.is_cut:
            _cut = _Cut.here()
        marks = sorted(e.start_ns() for e in events if e.name() == self._MARK)
        bounds_ns = [self._began_ns, *marks, max(ended_ns, *marks, self._began_ns)]
        changes, spans, live, position = _changes(events), list[Span](), 0, 0
        for began_ns, end_ns in pairwise(bounds_ns):
            before = peak = live
            is_last = len(spans) == len(marks)
            while position < len(changes) and (is_last or changes[position][0] < end_ns):
                live += changes[position][1]
                peak = max(peak, live)
                position += 1
            time_us = (end_ns - began_ns) / 1e3
            spans.append(Span(before_bytes=before, peak_bytes=peak, after_bytes=live, time_us=time_us))
        return spans


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
        _collect_garbage()
        self._api.synchronize(self._device)
        yield CudaProbe(self._api, self._device)

    def watch(self) -> CudaWatch:
        return CudaWatch(self._api, self._device)


class CudaWatch:
    """The allocator's highest mark, read and set back at each mark of ours."""

    is_cut = False

    def __init__(self, api: Any, device: torch.device) -> None:
        self._api = api
        self._device = device
        self._start = self._before = api.memory_allocated(device)
        self._samples: list[MemorySample] = []
        self._events: list[Any] = []
        api.reset_peak_memory_stats(device)
        self._record()

    def _record(self) -> None:
        event = self._api.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def mark(self) -> None:
        start, device = self._start, self._device
        peak, after = self._api.max_memory_allocated(device), self._api.memory_allocated(device)
        sample = MemorySample(before_bytes=self._before - start, peak_bytes=peak - start, after_bytes=after - start)
        self._samples.append(sample)
        self._before = after
        self._api.reset_peak_memory_stats(device)
        self._record()

    def end(self) -> list[int]:
        return _rises(self.spans())

    def spans(self) -> list[Span]:
        self.mark()
        self._api.synchronize(self._device)
        times_us = (1e3 * start.elapsed_time(end) for start, end in pairwise(self._events))
        return [
            Span(before_bytes=s.before_bytes, peak_bytes=s.peak_bytes, after_bytes=s.after_bytes, time_us=t)
            for s, t in zip(self._samples, times_us, strict=True)
        ]


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
