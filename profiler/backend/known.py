"""Which devices there are: the only place that knows their kinds by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlannerError
from profiler.backend.cpu import CpuBackend
from profiler.backend.cuda import CudaBackend
from profiler.backend.offered import Backend

# Kinds of devices beside the CPU. What torch offers for one of them is torch.KIND.
_ACCELERATORS: dict[str, Callable[[torch.device, Any], Backend]] = {CudaBackend.kind: CudaBackend}


class UnknownBackend(PlannerError):  # noqa: N818 - named after what there is not
    """A device of a kind that nobody wrote a backend for."""


def accelerators() -> Sequence[str]:
    """The kinds of devices that there are beside the CPU."""
    return tuple(_ACCELERATORS)


def is_accelerator(device: torch.device) -> bool:
    """Whether it is a device beside the CPU."""
    return device.type in _ACCELERATORS


def backend_for(device: torch.device, api: Any = None, *, root: Path = Path("/")) -> Backend:
    """What `device` offers; UnknownBackend names what there is.

    `api` is a stand-in of torch.KIND in tests, `root` of where the CPU's system files are.
    """
    if device.type == CpuBackend.kind:
        return CpuBackend(root=root)
    if not is_accelerator(device):
        known = ", ".join((CpuBackend.kind, *_ACCELERATORS))
        raise UnknownBackend(
            f"nothing is known of devices of kind {device.type!r}: there are {known}; a kind is one class in "
            "profiler/backend"
        )
    return _ACCELERATORS[device.type](device, _api(device.type) if api is None else api)


def _api(kind: str) -> Any:
    return getattr(torch, kind)


# -- all of them at once --------------------------------------------------------------------------------------------


def free_caches() -> None:
    """Give back what allocators hold without a tensor in it, on every kind of device that is there."""
    for kind in _ACCELERATORS:
        if _api(kind).is_available():
            _api(kind).empty_cache()


def generator_states() -> dict[str, list[Tensor]]:
    """Where the default generators of every kind of device in use stand."""
    return {kind: _api(kind).get_rng_state_all() for kind in _ACCELERATORS if _api(kind).is_initialized()}


def restore_generator_states(states: dict[str, list[Tensor]]) -> None:
    """Put them back there."""
    for kind, found in states.items():
        _api(kind).set_rng_state_all(found)


def reseeding_functions() -> list[tuple[Any, str]]:
    """(module, name) of what sets or seeds the generators of devices beside the CPU."""
    return [(_api(kind), name) for kind in _ACCELERATORS for name in ("set_rng_state", "manual_seed_all")]
