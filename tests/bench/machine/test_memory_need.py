"""Memory that would not be enough: counted before a step runs, told with the numbers, predicted by sweeps."""

from dataclasses import replace

import pytest
import torch

import profiler.measuring.memory
import rewriter.memory_need
from bench.__main__ import main
from bench.experiments.comparison.planned_steps import PROVEN_STEPS
from bench.workloads.spec import WorkloadSpec
from profiler.measuring.memory import HEADROOM
from profiler.measuring.restoring import Touched
from rewriter.memory_need import Need, lack, need_of
from rewriter.proof import observe

SPEC = WorkloadSpec(source="tests.bench.small:make", batch=8)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def captured():
    workload = SPEC.make()
    return workload, SPEC.capture(workload)


def test_copies_are_counted_as_measuring_and_proving_make_them(captured):
    (step, model, optimizer, batch), traced = captured
    seen = observe(lambda b: step(model, optimizer, b), Touched.by(traced, batch), batch, steps=PROVEN_STEPS)
    uncounted = ("returned values", "generators")  # a loss, and a few kilobytes
    seen_bytes = sum(t.nbytes for (kind, _), t in seen.tensors.items() if kind not in uncounted)
    params_bytes = sum(p.nbytes for p in model.parameters())
    kept_bytes = params_bytes + sum(b.nbytes for b in model.buffers())  # there is no optimizer state yet

    need = need_of(traced, proven_steps=PROVEN_STEPS)
    assert need.done_copies_bytes == kept_bytes + 2 * seen_bytes
    assert need.peak_copies_bytes == kept_bytes + seen_bytes + (PROVEN_STEPS - 1) * params_bytes  # earlier gradients
    assert need.done_bytes == 2 * params_bytes  # gradients and momentum
    assert need.peak_bytes > need.done_bytes

    planned = need_of(traced, proven_steps=PROVEN_STEPS, added_bytes=7)
    assert planned == replace(need, peak_bytes=7 + params_bytes)  # and the momentum that the first step makes
    measuring = need_of(traced)
    assert (measuring.peak_bytes, measuring.peak_copies_bytes) == (need.peak_bytes, kept_bytes)


def given(monkeypatch, **available_bytes):
    for module in (rewriter.memory_need, profiler.measuring.memory):
        monkeypatch.setattr(module, "available_bytes", lambda device: available_bytes[device.type])


NEED = Need(peak_bytes=1000, peak_copies_bytes=500, done_bytes=100, done_copies_bytes=700)


def test_on_the_cpu_the_step_and_its_copies_share_the_memory(monkeypatch):
    enough = int(1500 / (1 - HEADROOM)) + 2
    given(monkeypatch, cpu=enough)
    assert lack(NEED, CPU) == ""
    given(monkeypatch, cpu=enough - 10)
    assert lack(NEED, CPU).startswith("it needs 1.5 KiB more on cpu, copies included, and 1.5 KiB of the 1.7 KiB")


def test_copies_after_the_step_count_where_they_are_more_than_its_peak(monkeypatch):
    given(monkeypatch, cpu=2000)
    assert lack(NEED, CPU) == ""
    late = Need(peak_bytes=1000, peak_copies_bytes=500, done_bytes=100, done_copies_bytes=1700)
    assert lack(late, CPU).startswith("it needs 1.8 KiB more")


def test_the_copies_of_a_step_on_a_gpu_lie_in_main_memory(monkeypatch):
    given(monkeypatch, cuda=1200, cpu=900)
    assert lack(NEED, GPU) == ""
    given(monkeypatch, cuda=1100, cpu=900)
    assert "it needs 1000 B more on cuda:0" in lack(NEED, GPU)
    given(monkeypatch, cuda=1200, cpu=800)
    assert "it needs 700 B more on cpu" in lack(NEED, GPU)


@pytest.mark.parametrize("command", [[], ["verify"], ["profile"], ["graph"], ["pareto"], ["pareto", "--roofline"]])
def test_memory_that_runs_out_is_one_line_in_every_command_that_runs_a_step(command, capsys, monkeypatch, tmp_path):
    def fails(self):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")

    monkeypatch.setattr(WorkloadSpec, "make", fails)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--import", SPEC.source]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench: out of memory while ")
    assert "tests.bench.small:make b8: DefaultCPUAllocator" in error
    assert len(error.strip().splitlines()) == 1
