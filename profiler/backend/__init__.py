"""What a device offers: its clock and allocator, its generators, what is free of it, its streams. One class each."""

from profiler.backend.known import (
    accelerators,
    backend_for,
    free_caches,
    generator_states,
    is_accelerator,
    reseeding_functions,
    restore_generator_states,
)
from profiler.backend.offered import Backend

__all__ = [
    "Backend",
    "accelerators",
    "backend_for",
    "free_caches",
    "generator_states",
    "is_accelerator",
    "reseeding_functions",
    "restore_generator_states",
]
