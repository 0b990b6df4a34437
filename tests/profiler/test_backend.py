"""What a device offers, in one class each; a GPU through a stand-in of torch.cuda."""

import pytest
import torch

from planner.allocator import Allocator
from profiler.backend import (
    Backend,
    accelerators,
    backend_for,
    generator_states,
    is_accelerator,
    known,
    reseeding_functions,
    restore_generator_states,
)
from profiler.backend.cpu import CpuBackend
from profiler.backend.cuda import CudaBackend
from profiler.backend.known import UnknownBackend
from profiler.measuring.meters import CpuMeter, CudaMeter
from tests.fake_cuda import FakeAllocator

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class FakeCuda(FakeAllocator):
    """Such a GPU whose generator stands at 7."""

    def __init__(self):
        super().__init__()
        self.states, self.waited, self.emptied = [torch.tensor([6]), torch.tensor([7])], [], 0
        self.default_generators = ["generator 0", "generator 1"]

    def synchronize(self, device):
        self.waited.append(device)

    def get_rng_state(self, device):
        return self.states[device.index]

    def set_rng_state(self, state, device):
        self.states[device.index] = state

    def get_rng_state_all(self):
        return list(self.states)

    def set_rng_state_all(self, states):
        self.states = list(states)

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def empty_cache(self):
        self.emptied += 1

    def Stream(self, device):  # noqa: N802 - as torch.cuda spells it
        return object()


@pytest.mark.parametrize("cls", [CpuBackend, CudaBackend])
def test_every_backend_offers_all_that_is_asked_for(cls):
    asked = {name for name in vars(Backend) if not name.startswith("_")}
    assert asked <= set(dir(cls)) | set(cls.__dataclass_fields__)


def test_the_cpu_has_no_allocator_that_holds_or_tells_anything():
    cpu = backend_for(CPU)
    assert isinstance(cpu, CpuBackend)
    assert isinstance(cpu.meter(), CpuMeter)
    assert (cpu.allocator(), cpu.allocated_bytes(), cpu.copy_streams()) == (None, None, None)
    assert 0 < cpu.available_bytes() <= cpu.total_bytes()


def test_a_gpu_tells_its_memory_and_is_waited_for():
    api = FakeCuda()
    gpu = backend_for(GPU, api)
    assert isinstance(gpu.meter(), CudaMeter)
    assert (gpu.available_bytes(), gpu.total_bytes(), gpu.allocated_bytes()) == (650, 1000, 150)
    assert gpu.allocator() is Allocator.CACHING
    gpu.synchronize()
    assert api.waited == [GPU]


def test_generators_are_those_of_the_device():
    api = FakeCuda()
    gpu = backend_for(GPU, api)
    assert gpu.generator() == "generator 1"
    before = gpu.generator_state()
    gpu.set_generator_state(torch.tensor([9]))
    assert (before.item(), api.states[1].item(), api.states[0].item()) == (7, 9, 6)
    assert backend_for(CPU).generator() is torch.default_generator
    state = backend_for(CPU).generator_state()
    torch.rand(1)
    backend_for(CPU).set_generator_state(state)
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_out_and_back_have_a_stream_each():
    out, back = backend_for(GPU, FakeCuda()).copy_streams()
    assert out is not back


def test_all_devices_in_use_are_put_back_at_once(monkeypatch):
    api = FakeCuda()
    monkeypatch.setattr(known, "_api", lambda kind: api)
    states = generator_states()
    api.states = [torch.tensor([0]), torch.tensor([0])]
    restore_generator_states(states)
    assert [state.item() for state in api.states] == [6, 7]
    known.free_caches()
    assert api.emptied == 1


def test_no_device_in_use_has_no_states_to_put_back():
    assert generator_states() == {}  # this torch has no CUDA
    restore_generator_states({})


def test_a_kind_that_nobody_wrote_is_named_with_those_there_are():
    assert accelerators() == ("cuda",)
    assert is_accelerator(GPU)
    assert not is_accelerator(CPU)
    with pytest.raises(UnknownBackend, match="there are cpu, cuda; a kind is one"):
        backend_for(torch.device("mps"))
    assert {name for _, name in reseeding_functions()} == {"set_rng_state", "manual_seed_all"}
