"""Devices that are not there are told by name before any work."""

import pytest
import torch

from bench.__main__ import main
from bench.show.file_names import slug
from bench.workloads.spec import WorkloadError, WorkloadSpec, moved, torch_device
from tests.fake_cuda import FakeCuda


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
    assert slug(spec.title_of_all_batches) == "resnet18_on_cuda_1"


def test_accuracy_refuses_a_gpu_whose_memory_the_process_does_not_hold(capsys):
    assert main(["accuracy", "--model", "resnet18", "--device", "cuda"]) == 2
    assert "holds no GPU tensor" in capsys.readouterr().err
