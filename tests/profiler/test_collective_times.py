"""What a collective takes: each kind and size by itself and the same number of times on every rank."""

from contextlib import contextmanager
from itertools import cycle

import pytest
import torch
from torch import nn

from profiler.measuring.collective_times import RUNS, collective_costs
from profiler.measuring.meters import MemorySample
from profiler.tracing.ranks.imagined import Sharding, imagined_group, shared_out
from profiler.tracing.whole_step import capture
from profiler.workload import Workload

LAPS_US = (100.0, 3.0, 1.0, 2.0)  # of the four runs; the first one finds nothing in its place yet
SCRATCH_BYTES, ELSEWHERE_BYTES = 7, 1000


class Meter:
    """A meter that says what it is told to, and counts what it is asked."""

    device = "made up"

    def __init__(self):
        self.laps, self.watched, self._times = 0, 0, cycle(LAPS_US)

    def stopwatch(self):
        return Stopwatch(self)

    @contextmanager
    def memory_probe(self):
        yield Probe(self)


class Stopwatch:
    def __init__(self, meter):
        self._meter, self._laps_us = meter, []

    def lap(self, call, *, repeats=1):
        self._meter.laps += repeats
        self._laps_us.append(next(self._meter._times))
        return call()

    def laps_us(self):
        return self._laps_us


class Probe:
    """What is live before a call, what the call makes, and so much more meanwhile."""

    def __init__(self, meter):
        self._meter, self._made_bytes = meter, 0

    def watch(self, call):
        self._meter.watched += 1
        made = call()
        self._made_bytes = made.untyped_storage().nbytes()
        return made

    def samples(self):
        peak_bytes = ELSEWHERE_BYTES + self._made_bytes + SCRATCH_BYTES
        return [MemorySample(before_bytes=ELSEWHERE_BYTES, peak_bytes=peak_bytes, after_bytes=ELSEWHERE_BYTES)]


def step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def seen():
    """A sharded step of four equal layers and another one, its collectives measured by the stand-in."""
    with imagined_group(2) as mesh:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)), nn.Linear(16, 8))
        workload = Workload(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16))
        traced = capture(*shared_out(workload, Sharding.FSDP2, mesh))
        meter = Meter()
        return traced.graph, collective_costs(traced.graph, traced.nodes, meter), meter


def kinds_and_sizes(graph):
    works = {launch: graph.ops[launch].collective for launch in graph.wait_of}
    return {launch: (work.kind, work.group, work.nbytes) for launch, work in works.items()}


def test_each_kind_and_size_is_measured_once_and_the_same_number_of_times(seen):
    graph, costs, meter = seen
    known = kinds_and_sizes(graph)
    assert set(costs) == set(known)
    different = len(set(known.values()))
    assert 2 <= different < len(known), "equal layers communicate alike"
    assert meter.laps == RUNS * different, "ranks that ask for other numbers of collectives wait for ever"
    assert meter.watched == different
    assert len({id(cost) for cost in costs.values()}) == different


def test_its_time_is_the_median_without_the_first_run_and_its_scratch_what_it_did_not_make(seen):
    _, costs, _ = seen
    assert {cost.time_us for cost in costs.values()} == {2.0}
    assert {cost.scratch_bytes for cost in costs.values()} == {SCRATCH_BYTES}
