"""Clocks that wait for a GPU, as far as no GPU is needed, and what is made of many readings."""

import time

import torch

from bench.machine.clock import Clock, Taken, spread
from tests.fake_cuda import FakeCuda


def test_a_clock_waits_for_the_gpu_before_and_after_and_never_for_the_cpu():
    api, order = FakeCuda(), []
    seconds, result = Clock(torch.device("cuda", 1), api).timed(lambda: order.append(len(api.waits)) or "done")
    assert order == [1]
    assert api.waits == [torch.device("cuda", 1)] * 2
    assert result == "done"
    assert seconds >= 0
    Clock(torch.device("cpu"), api).seconds(lambda: None)
    assert len(api.waits) == 2


def test_a_spread_is_the_median_and_the_quartiles():
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert spread([]) is None


def test_waiting_is_time_by_the_clock_and_none_of_a_processor():
    slept = Clock(torch.device("cpu")).taken(lambda: time.sleep(0.05))
    assert slept.wall_s >= 0.05 > slept.cpu_s


def test_what_calls_took_is_compared_by_both_clocks():
    assert Taken(wall_s=3.0, cpu_s=1.0).over(Taken(wall_s=2.0, cpu_s=4.0)) == Taken(wall_s=1.5, cpu_s=0.25)
    assert Taken(wall_s=3.0, cpu_s=1.0).over(Taken(wall_s=2.0, cpu_s=0.0)).cpu_s == 1.0
