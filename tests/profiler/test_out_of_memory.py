"""Running out of memory, told apart from every other failure."""

import pytest
import torch

from profiler.measuring.memory import OutOfMemory, guarded, is_exhaustion


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
