"""Measuring a captured step: true to the allocator, never zero, and without a trace left behind."""

import random
import unittest.mock
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.workloads import zoo as models
from planner.ir import Rerun, TimingKind
from planner.plan import Plan
from planner.schedule import Run, lower
from planner.simulator import simulate
from profiler.errors import CaptureError
from profiler.measuring.meters import CpuMeter
from profiler.measuring.op_times import TIMED_RUNS, measure
from profiler.ops import fresh, inplace_target, overload
from profiler.tracing.whole_step import capture
from tests.profiler import small
from tests.rewriter import tiny
from tests.shared import case_of

RUNS = 2 + TIMED_RUNS  # one to warm up, one that watches the allocator, and the timed ones


def quietly(traced, batch, **options):
    return measure(traced, batch, show_progress=False, **options)


def contents(model, optimizer):
    """Identities and values of everything that a step touches."""
    tensors = {f"param {n}": p for n, p in model.named_parameters()}
    tensors |= {f"grad {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors |= {f"buffer {n}": b for n, b in model.named_buffers()}
    for p, state in optimizer.state.items():
        tensors |= {f"state {id(p)} {key}": value for key, value in state.items()}
    generators = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    return {k: (id(t), t.tolist()) for k, t in tensors.items()}, generators


# -- nothing is changed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_measuring_changes_nothing(optimizer, steps_before):
    step, model, optimizer, batch = small.make(optimizer=optimizer)()
    for _ in range(steps_before):
        step(model, optimizer, batch)
    traced = capture(step, model, optimizer, batch)
    before = contents(model, optimizer)
    quietly(traced, batch)
    assert contents(model, optimizer) == before
    assert bool(optimizer.state) == bool(steps_before)


class Failing(CpuMeter):
    """A meter whose op number `at` fails: after the optimizer, in the third run."""

    def __init__(self, at):
        self.at = at

    def stopwatch(self):
        meter = self

        class Watch(type(super().stopwatch())):
            def lap(self, call, *, repeats=1):
                meter.at -= 1
                if meter.at == 0:
                    raise ArithmeticError("half-way")
                return super().lap(call, repeats=repeats)

        return Watch()


@pytest.mark.parametrize("share", [0.1, 0.9, 1.5])
def test_an_op_that_fails_half_way_leaves_everything_as_it_was(share):
    step, model, optimizer, batch = small.make(optimizer=small.adam)()
    step(model, optimizer, batch)
    traced = capture(step, model, optimizer, batch)
    before = contents(model, optimizer)
    laps = len(lower(traced.graph, Plan()).steps)
    with pytest.raises(ArithmeticError, match="half-way"):
        quietly(traced, batch, meter=Failing(int(share * laps)))
    assert contents(model, optimizer) == before


def test_an_op_that_cannot_run_on_real_tensors_is_told_by_its_line(monkeypatch):
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)

    def fails(*args, **kwargs):
        raise RuntimeError("view size is not compatible")

    traced.nodes[0].target = fails
    with pytest.raises(CaptureError, match=r"small\.py:.* fails on your tensors.*view size"):
        quietly(traced, batch)


def test_the_step_trains_on_as_if_it_had_not_been_measured():
    def train(measured):
        torch.manual_seed(0)
        step, model, optimizer, batch = small.make()()
        traced = capture(step, model, optimizer, batch)
        if measured:
            traced = quietly(traced, batch).traced
        return [traced.run(batch).item() for _ in range(3)]

    assert train(True) == train(False)


def test_another_batch_shape_is_refused_by_name():
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    with pytest.raises(CaptureError, match=r"batch leaf 0 was .*\[12, 6\].* and is .*\[5, 6\]"):
        quietly(traced, (batch[0][:5], batch[1][:5]))


# -- time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [small.sgd, small.adam])
def test_no_op_is_recorded_as_taking_no_time(optimizer):
    step, model, optimizer, batch = small.make(optimizer=optimizer)()
    result = quietly(capture(step, model, optimizer, batch), batch)
    assert all(op.time_us > 0 for op in result.graph.ops)
    assert result.graph.time_us == pytest.approx(sum(s.time_us for s in result.stats)), "pooling moves no time"
    assert all(s.spread_us >= 0 for s in result.stats)
    assert result.graph.timing.kind is TimingKind.MEASURED
    assert result.graph.timing.device == CpuMeter().device


class Count(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def test_ops_that_draw_or_write_run_once_in_each_run_and_short_pure_ones_in_a_loop():
    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    with Count() as count, unittest.mock.patch.object(type(traced.convention), "check", return_value=[]):
        quietly(traced, batch)
    expected, looped = Counter(), set()
    for step in lower(traced.graph, Plan()).steps:
        if not isinstance(step, Run):
            continue
        op, node = traced.graph.ops[step.op], traced.nodes[step.op]
        target = overload(node) if step.into is None else inplace_target(node)
        if op.rerun is not Rerun.FREELY or step.into is not None:
            expected[target] += RUNS
        elif node.target is not fresh:
            looped.add(target)
    once = {target: n for target, n in expected.items() if target not in looped and "copy_" not in str(target)}
    names = {str(target) for target in once}
    assert {"aten.bernoulli_.float", "aten.native_batch_norm.default", "aten.mul_.Tensor"} <= names
    assert {target: count.calls[target] for target in once} == once
    assert count.calls[torch.ops.aten.t.default] > 5 * RUNS, "a view takes less than the clock can tell"


def test_the_median_of_the_runs_counts_and_the_warm_up_does_not():
    class Slower(CpuMeter):
        """Each stopwatch (one per run) shows its own number for every lap."""

        shown = iter([1000.0, 5.0, 9.0, 6.0])  # the first is the warm-up

        def stopwatch(self):
            us = next(self.shown)

            class Watch(type(super().stopwatch())):
                def laps_us(self):
                    return [us] * len(super().laps_us())

            return Watch()

    step, model, optimizer, batch = small.make()()
    traced = capture(step, model, optimizer, batch)
    result = quietly(traced, batch, meter=Slower())
    frees = Counter(traced.graph.maker[s.storage] for s in lower(traced.graph, Plan()).steps if not isinstance(s, Run))
    for op, stats in zip(traced.graph.ops, result.stats, strict=True):
        laps = 1 + frees[op.id]  # freeing what it made is part of an op's time
        assert stats.time_us == pytest.approx(6.0 * laps)
        assert stats.spread_us == pytest.approx(4.0 * laps)


def test_equal_layers_take_equal_times_and_others_their_own():
    traced = quietly(case_of(tiny.plain).captured, case_of(tiny.plain).batch).traced
    convolutions = [op for op in traced.graph.ops if op.target == "aten.convolution.default"]
    first, *equal = [op.time_us for op in convolutions]
    assert len(equal) == 4
    assert len(set(equal)) == 1
    assert first not in equal, "its input has other channels"


# -- memory -------------------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent layer, whose kernel makes a workspace that no shape function knows of, for its backward."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def frozen():
    model = small.mlp()
    model[0].weight.requires_grad_(False)
    return model


STEPS = {
    "ResNet": tiny.resnet,
    "BERT": tiny.bert,
    "BERT with eager attention": lambda: models.bert(4, seq=16, attention="eager", **tiny.BERT),
    "default Adam": small.make(optimizer=small.adam),
    "LSTM": small.make(model=Tagger, batch=lambda: (torch.randn(4, 5, 4), torch.randint(0, 3, (4,)))),
    "frozen weight": small.make(model=frozen),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_simulated_peak_of_the_unplanned_step_is_the_allocators(name):
    case = case_of(STEPS[name])
    schedule = lower(case.graph, Plan())
    assert case.predicted(schedule) == pytest.approx(case.peak(schedule), rel=1e-4)


def test_memory_before_and_at_the_peak_of_each_op_is_what_the_simulator_says():
    case = case_of(tiny.bert)
    result = quietly(case.captured, case.batch)
    schedule = lower(result.graph, Plan())
    timeline = simulate(result.graph, schedule)
    during = [n for s, n in zip(schedule.steps, timeline.bytes_at, strict=True) if isinstance(s, Run)]
    into = [s.into is not None for s in schedule.steps if isinstance(s, Run)]
    assert [s.peak_bytes for s in result.stats] == during
    for stats, in_place in zip(result.stats, into, strict=True):
        fresh_bytes = 0 if in_place else stats.output_bytes
        assert stats.peak_bytes - stats.before_bytes == fresh_bytes + stats.workspace_bytes


def test_the_opaque_optimizer_is_measured_with_the_memory_it_works_in():
    step, model, optimizer, batch = small.make(optimizer=small.adam)()
    result = quietly(capture(step, model, optimizer, batch), batch)
    (op,) = [op for op in result.graph.ops if op.target == "optimizer_step"]
    largest = max(p.nbytes for p in model.parameters())
    assert op.time_us > 0
    assert op.workspace_bytes >= largest, "its denominator is a tensor as large as the parameter"


def test_sizes_that_only_the_kernel_knows_are_corrected():
    case = case_of(STEPS["LSTM"])
    pairs = zip(case.graph.storages, case.captured.graph.storages, strict=True)
    assert sum(s.nbytes > before.nbytes for s, before in pairs) == 2, "one workspace per layer"
