"""Clocks that wait for a GPU, as far as no GPU is needed, and what is made of many readings."""

import torch

from bench.machine.clock import Clock, spread
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
