"""How much memory can still be had, and what running out of it looks like."""

from types import SimpleNamespace

import pytest
import torch

from profiler.capacity import available_bytes, is_exhaustion

CPU = torch.device("cpu")
GIB = 2**30


def system(tmp_path, **files):
    for name, text in files.items():
        file = tmp_path / name.replace("__", "/").replace("dot", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


MEMINFO = "MemTotal:       33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\n"


def test_linux_tells_what_is_available(tmp_path):
    assert available_bytes(CPU, root=system(tmp_path, proc__meminfo=MEMINFO)) == 16 * GIB


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("sys__fs__cgroup__memorydotmax", "sys__fs__cgroup__memorydotcurrent"),
        ("sys__fs__cgroup__memory__memorydotlimit_in_bytes", "sys__fs__cgroup__memory__memorydotusage_in_bytes"),
    ],
)
def test_a_container_leaves_what_its_limit_does(tmp_path, limit, used):
    root = system(tmp_path, proc__meminfo=MEMINFO, **{limit: f"{4 * GIB}\n", used: f"{GIB}\n"})
    assert available_bytes(CPU, root=root) == 3 * GIB


def test_a_container_without_a_limit_is_none(tmp_path):
    files = {"sys__fs__cgroup__memorydotmax": "max\n", "sys__fs__cgroup__memorydotcurrent": "5\n"}
    assert available_bytes(CPU, root=system(tmp_path, proc__meminfo=MEMINFO, **files)) == 16 * GIB


def test_a_system_that_tells_nothing_has_its_physical_memory(tmp_path):
    assert available_bytes(CPU, root=tmp_path) > 2**27


def test_a_gpu_has_what_is_free_and_what_its_allocator_holds_unused():
    api = SimpleNamespace(
        mem_get_info=lambda device: (3 * GIB, 8 * GIB),
        memory_reserved=lambda device: 2 * GIB,
        memory_allocated=lambda device: GIB,
    )
    assert available_bytes(torch.device("cuda"), api) == 4 * GIB


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_running_out_of_memory_is_recognised(error):
    assert is_exhaustion(error)


def test_another_failure_is_not_taken_for_it():
    assert not is_exhaustion(RuntimeError("shapes do not match"))
