"""The meters: CUDA's against a stand-in of its event and allocator API, the CPU's on known allocations."""

import gc
from dataclasses import dataclass, field

import pytest
import torch
from torch.autograd.profiler import record_function

from planner.ir import TimingKind
from profiler.measuring import meters
from profiler.measuring.meters import CpuMeter, CudaMeter, MemorySample, Span, meter_for, peak_above_start
from profiler.measuring.op_times import measure
from profiler.tracing.whole_step import capture
from tests.profiler import small

GPU = torch.device("cuda", 1)


@dataclass
class FakeCuda:
    """What the meter uses of torch.cuda: a clock that only work moves, and an allocator with a high-water mark."""

    now_us: float = 0.0
    allocated: int = 0
    highest: int = 0
    synchronized: int = 0
    asked: set = field(default_factory=set)

    def work(self, us=0.0, *, allocates=0, frees=0):
        self.now_us += us
        self.allocated += allocates
        self.highest = max(self.highest, self.allocated)
        self.allocated -= frees

    def Event(self, *, enable_timing):  # noqa: N802 - the name that torch gave it
        assert enable_timing
        return FakeEvent(self)

    def synchronize(self, device):
        self.asked.add(device)
        self.synchronized += 1

    def memory_allocated(self, device):
        self.asked.add(device)
        return self.allocated

    def max_memory_allocated(self, device):
        self.asked.add(device)
        return self.highest

    def reset_peak_memory_stats(self, device):
        self.asked.add(device)
        self.highest = self.allocated

    def get_device_name(self, device):
        self.asked.add(device)
        return "NVIDIA Stand-In"


class FakeEvent:
    """An event that can be read only after the device was synchronised, as on a real one."""

    def __init__(self, cuda):
        self.cuda = cuda
        self.at_us = None
        self.synchronized_before = None
        self.before_record = lambda: None

    def record(self):
        self.before_record()
        self.at_us = self.cuda.now_us
        self.synchronized_before = self.cuda.synchronized

    def elapsed_time(self, end):
        assert self.cuda.synchronized > end.synchronized_before, "read before it was reached"
        return (end.at_us - self.at_us) / 1e3  # milliseconds


# -- CUDA -----------------------------------------------------------------------------------------------------------


def test_the_meter_of_a_device_is_its_own():
    assert isinstance(meter_for(torch.device("cpu")), CpuMeter)
    assert isinstance(meter_for(GPU), CudaMeter)


def test_the_cuda_meter_names_the_device():
    cuda = FakeCuda()
    assert CudaMeter(cuda, GPU).device == "NVIDIA Stand-In"
    assert cuda.asked == {GPU}


def test_cuda_laps_are_events_read_once_at_the_end():
    cuda = FakeCuda()
    watch = CudaMeter(cuda, GPU).stopwatch()
    assert watch.lap(lambda: cuda.work(250.0) or "first") == "first"
    cuda.work(1000.0)  # between the laps: counted for none
    watch.lap(lambda: cuda.work(4.0))
    assert cuda.synchronized == 0, "waiting after each op would time the wait"
    assert watch.laps_us() == pytest.approx([250.0, 4.0])
    assert cuda.synchronized == 1


def test_a_cuda_lap_repeated_counts_with_its_mean_and_returns_the_last_result():
    cuda = FakeCuda()
    results = iter(range(10))

    def call():
        result = next(results)
        cuda.work(1.0 + result)
        return result

    watch = CudaMeter(cuda, GPU).stopwatch()
    assert watch.lap(call, repeats=4) == 3
    assert watch.laps_us() == pytest.approx([(1 + 2 + 3 + 4) / 4])


def test_the_cuda_probe_counts_from_its_start():
    cuda = FakeCuda(allocated=1000, highest=9000)
    with CudaMeter(cuda, GPU).memory_probe() as probe:
        assert cuda.synchronized == 1
        assert probe.watch(lambda: cuda.work(allocates=300, frees=100) or "kept 200") == "kept 200"
        cuda.work(frees=50)
        probe.watch(lambda: cuda.work(allocates=10))
    assert probe.samples() == [
        MemorySample(before_bytes=0, peak_bytes=300, after_bytes=200),
        MemorySample(before_bytes=150, peak_bytes=160, after_bytes=160),
    ]
    assert cuda.asked == {GPU}


def test_the_peak_above_the_start_leaves_out_what_was_there_before():
    cuda = FakeCuda(allocated=5000)
    assert peak_above_start(CudaMeter(cuda, GPU), lambda: cuda.work(allocates=700, frees=600)) == 700


def test_a_step_is_measured_through_the_cuda_meter():
    class Ticking(FakeCuda):
        """An event comes 7 µs after the one before it, and every op works in 64 bytes."""

        def Event(self, *, enable_timing):  # noqa: N802
            event = super().Event(enable_timing=enable_timing)
            event.before_record = lambda: self.work(7.0)
            return event

        def reset_peak_memory_stats(self, device):
            super().reset_peak_memory_stats(device)
            self.work(allocates=64, frees=64)

    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    result = measure(traced, batch, meter=CudaMeter(Ticking(), GPU), show_progress=False)
    assert result.graph.timing.kind is TimingKind.MEASURED
    assert result.graph.timing.device == "NVIDIA Stand-In"
    assert all(stats.time_us > 0 for stats in result.stats)
    assert {stats.peak_bytes - stats.before_bytes for stats in result.stats} == {64}


def test_a_cuda_watch_knows_bytes_and_time_of_every_span():
    cuda = FakeCuda(allocated=1000, highest=9000)
    watch = CudaMeter(cuda, GPU).watch()
    cuda.work(5.0, allocates=300, frees=100)
    watch.mark()
    cuda.work(7.0, allocates=50, frees=200)
    assert watch.spans() == [
        Span(before_bytes=0, peak_bytes=300, after_bytes=200, time_us=pytest.approx(5.0)),
        Span(before_bytes=200, peak_bytes=250, after_bytes=50, time_us=pytest.approx(7.0)),
    ]


# -- CPU ------------------------------------------------------------------------------------------------------------


def test_the_cpu_meter_names_the_machine_and_its_threads():
    assert CpuMeter().device.endswith("CPU, 1 thread")


def test_cpu_laps_are_differences_of_the_monotonic_clock(monkeypatch):
    now_ns = iter([100, 2100, 10_000, 10_500])
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: next(now_ns))
    watch = CpuMeter().stopwatch()
    assert watch.lap(lambda: "a") == "a"
    watch.lap(lambda: None)
    assert watch.laps_us() == [2.0, 0.5]


def test_a_cpu_lap_repeated_counts_with_its_mean_and_returns_the_last_result(monkeypatch):
    now_ns = iter([0, 12_000])
    monkeypatch.setattr(meters.time, "perf_counter_ns", lambda: next(now_ns))
    results = iter(range(10))
    watch = CpuMeter().stopwatch()
    assert watch.lap(lambda: next(results), repeats=6) == 5
    assert watch.laps_us() == [2.0]
    assert next(results) == 6


def buffer(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8)


def test_the_cpu_probe_sees_outputs_workspace_and_what_remains():
    def op():
        scratch = buffer(4096)
        out = buffer(1024)
        del scratch
        return out

    with CpuMeter().memory_probe() as probe:
        first = probe.watch(op)
        second = probe.watch(lambda: buffer(100))
        del first
        probe.watch(lambda: None)
    assert len(second) == 100
    assert probe.samples() == [
        MemorySample(before_bytes=0, peak_bytes=5120, after_bytes=1024),
        MemorySample(before_bytes=1024, peak_bytes=1124, after_bytes=1124),
        MemorySample(before_bytes=100, peak_bytes=100, after_bytes=100),
    ]


def test_a_cpu_watch_knows_bytes_and_time_of_every_span():
    watch = CpuMeter().watch()
    assert watch is not None
    assert CpuMeter().watch() is None, "one at a time"
    first = buffer(1000)
    watch.mark()
    scratch = buffer(400)
    del first, scratch
    watch.mark()
    kept = buffer(10)
    spans = watch.spans()
    assert [(s.before_bytes, s.peak_bytes, s.after_bytes) for s in spans] == [
        (0, 1000, 1000),
        (1000, 1400, 0),
        (0, 10, 10),
    ]
    assert all(s.time_us > 0 for s in spans)
    assert len(kept) == 10


def test_the_cpu_probe_sees_the_temporary_of_a_call():
    a = torch.randn(64, 64)
    with CpuMeter().memory_probe() as probe:
        kept = probe.watch(lambda: a.neg().sum())
    (sample,) = probe.samples()
    assert sample.peak_bytes == a.nbytes + kept.nbytes
    assert sample.after_bytes == kept.nbytes == 4


def test_the_cpu_probe_sees_what_a_call_frees():
    held = []
    with CpuMeter().memory_probe() as probe:
        held += probe.watch(lambda: [buffer(500), buffer(20)])
        assert probe.watch(lambda: held.pop().nbytes) == 20
    assert probe.samples()[1] == MemorySample(before_bytes=520, peak_bytes=520, after_bytes=500)


def test_a_probe_of_no_calls_has_no_samples():
    with CpuMeter().memory_probe() as probe:
        pass
    assert probe.samples() == []


def test_a_cpu_watch_knows_whether_it_ended_inside_of_a_record_that_began_under_it():
    with record_function("around"):
        watch = CpuMeter().watch()
        with record_function("inside"):
            torch.ones(3)
        watch.end()
        assert not watch.is_cut
    watch = CpuMeter().watch()
    with record_function("open"):
        watch.end()
    assert watch.is_cut


def test_no_watch_begins_before_the_call_of_dynamos_is_left_in_which_one_was_cut():
    begun, open_watches = [], []

    @torch._dynamo.disable
    def begin_again():
        while open_watches:
            open_watches.pop().end()
        again = CpuMeter().watch()
        begun.append(again is not None)
        if again is not None:
            again.end()
        assert peak_above_start(CpuMeter(), lambda: torch.ones(100)) > 0, "a probe ends before the record does"

    def step(x):
        begin_again()
        begin_again()
        return x + 1

    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        watch = CpuMeter().watch()
        assert watch is not None, "the last call is left"
        open_watches.append(watch)
        compiled(torch.ones(3))
        assert watch.is_cut
    assert begun == [False] * 4


def test_a_call_that_raises_leaves_the_allocator_unwatched():
    def fail():
        raise ArithmeticError("half-way")

    def probed():
        with CpuMeter().memory_probe() as probe:
            probe.watch(fail)

    with pytest.raises(ArithmeticError, match="half-way"):
        probed()
    assert not torch.autograd._profiler_enabled()
    assert peak_above_start(CpuMeter(), lambda: buffer(10)) == 10


def test_what_only_a_cycle_held_does_not_count_as_given_back_by_a_call():
    cycle: list = [buffer(500)]
    cycle.append(cycle)
    del cycle

    def call():
        gc.collect()
        return buffer(100)

    assert peak_above_start(CpuMeter(), call) == 100


def test_the_peak_above_the_start_is_the_worst_moment_of_a_call():
    kept = buffer(10_000)

    def call():
        a = buffer(100)
        b = buffer(200)
        del a
        c = buffer(50)
        return b, c

    assert peak_above_start(CpuMeter(), call) == 300
    assert len(kept) == 10_000
