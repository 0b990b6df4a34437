"""How much memory can still be had, and what running out of it looks like."""

import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from profiler.measuring.memory import available_bytes, is_exhaustion

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


V2 = ("sys__fs__cgroup__memorydotmax", "sys__fs__cgroup__memorydotcurrent", "sys__fs__cgroup__memorydotstat")
V1 = tuple(f"sys__fs__cgroup__memory__memorydot{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat"))


@pytest.mark.parametrize(("limit", "used", "stat"), [V2, V1])
def test_a_container_leaves_what_its_limit_does(tmp_path, limit, used, stat):
    root = system(tmp_path, proc__meminfo=MEMINFO, **{limit: f"{4 * GIB}\n", used: f"{GIB}\n"})
    assert available_bytes(CPU, root=root) == 3 * GIB
    name = "inactive_file" if stat in V2 else "total_inactive_file"
    system(tmp_path, **{stat: f"anon 5\nactive_file 7\n{name} {GIB // 2}\n"})
    assert available_bytes(CPU, root=root) == 3 * GIB + GIB // 2


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps it")
def test_memory_that_was_freed_counts_as_available():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    blocks = [torch.ones(2**14) for _ in range(4096)]  # 64 KiB each, from the heap and not from pages of their own
    full = resident_bytes()
    del blocks[:-1]  # the last one keeps the heap from shrinking at its end
    available_bytes(CPU)
    assert full - resident_bytes() > 200 * 2**20


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
