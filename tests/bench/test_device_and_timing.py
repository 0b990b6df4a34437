"""Devices that are not there, clocks that wait for a GPU, and memory that runs out: as far as no GPU is needed."""

import pytest
import torch

from bench.__main__ import main
from bench.machine.clock import Clock, spread
from bench.workloads.spec import WorkloadError, WorkloadSpec, moved, torch_device
from profiler.measuring.memory import OutOfMemory, guarded, is_exhaustion


class FakeCuda:
    """The part of torch.cuda that a command asks before it moves anything."""

    def __init__(self, devices=2):
        self.devices, self.waits = devices, []

    def is_available(self):
        return self.devices > 0

    def device_count(self):
        return self.devices

    def synchronize(self, device):
        self.waits.append(device)


# -- --device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
@pytest.mark.parametrize("command", [[], ["verify"], ["profile"], ["graph"], ["plans", "--model", "resnet18"]])
def test_a_gpu_that_is_not_there_is_told_before_any_work(name, command, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("bench.workloads.spec._from_zoo", lambda _: pytest.fail("a model was made"))
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--device", name]) == 2
    error = capsys.readouterr().err
    assert f"--device {name}: this torch ({torch.__version__}) sees no CUDA device" in error
    assert "leave out --device" in error


def test_devices_by_name():
    assert torch_device("cpu", FakeCuda(devices=0)) == torch.device("cpu")
    assert torch_device("cuda", FakeCuda()) == torch.device("cuda", 0)
    assert torch_device("cuda:1", FakeCuda()) == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", ""])
def test_a_device_of_no_known_name_is_refused(name):
    with pytest.raises(WorkloadError, match="there are cpu, cuda and cuda:N"):
        torch_device(name, FakeCuda())


def test_a_device_number_that_is_not_there_says_how_many_are():
    with pytest.raises(WorkloadError, match="--device cuda:2: there are 2 CUDA devices"):
        torch_device("cuda:2", FakeCuda())


def test_moving_takes_the_model_and_every_tensor_of_the_batch_along():
    class Model(torch.nn.Linear):
        def to(self, device):
            self.went_to = device
            return self

    model = Model(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("meta")
    batch = moved(model, optimizer, {"x": torch.ones(2), "more": (torch.ones(3), "text", 7)}, device)
    assert model.went_to == device
    assert batch["x"].device == batch["more"][0].device == device
    assert batch["more"][1:] == ("text", 7)


def test_the_title_and_the_file_name_say_the_device():
    spec = WorkloadSpec(model="resnet18", device="cuda:1")
    assert spec.title == "resnet18 b8 on cuda:1"
    assert spec.slug != WorkloadSpec(model="resnet18").slug


def test_accuracy_refuses_a_gpu_whose_memory_the_process_does_not_hold(capsys):
    assert main(["accuracy", "--model", "resnet18", "--device", "cuda"]) == 2
    assert "holds no GPU tensor" in capsys.readouterr().err


# -- clocks -------------------------------------------------------------------------------------------------------


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


# -- memory that runs out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 99 bytes."),
    ],
    ids=lambda e: type(e).__name__,
)
def test_running_out_of_memory_is_recognised(error):
    def fails():
        raise error

    assert is_exhaustion(error)
    with pytest.raises(OutOfMemory, match="out of memory while baking"):
        guarded("baking", fails)


def test_a_real_refusal_of_the_allocator_is_recognised():
    with pytest.raises(OutOfMemory, match="out of memory while asking for too much"):
        guarded("asking for too much", lambda: torch.empty(1 << 60, dtype=torch.uint8))


def test_any_other_failure_stays_what_it_is():
    with pytest.raises(RuntimeError, match="something else"):
        guarded("baking", lambda: (_ for _ in ()).throw(RuntimeError("something else")))
