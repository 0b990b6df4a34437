"""What lies around a step without being passed to it: mixed precision, modes, and torch's own switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import call
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_saved_tensors_hooks
from torch.nn.modules import module as module_globals
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from profiler.tracing.guards.reach import GLOBAL_HOOKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """What the ops of a device are cast to around the step; None where they are not."""

    device_type: str
    dtype: torch.dtype | None

    @staticmethod
    def now(device_types: Iterable[str]) -> tuple[Autocast, ...]:
        """The state here and now, for those of the devices that have one."""
        known = [kind for kind in sorted(set(device_types)) if torch.amp.is_autocast_available(kind)]
        return tuple(Autocast(device_type=kind, dtype=_cast_to(kind)) for kind in known)

    def holds(self) -> bool:
        return _cast_to(self.device_type) is self.dtype

    def mismatches(self) -> Iterator[str]:
        now = _cast_to(self.device_type)
        if now is not self.dtype:
            yield f"autocast on {self.device_type} was {self.dtype or 'off'} and is {now or 'off'}"


def _cast_to(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _code_of(function: Any) -> Any:
    """What tells a function from another: closures are made anew each time."""
    return getattr(function, "__code__", type(function))


def _names_of(modes: Iterable[Any]) -> tuple[str, ...]:
    return tuple(type(mode).__name__ for mode in modes)


# What each is called in a sentence, and what tells its state: cheap, and equal only where it is the same.
_SWITCHES: dict[str, Callable[[], Any]] = {
    "gradient mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "the cache of autocast": torch.is_autocast_cache_enabled,
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "the number of threads": torch.get_num_threads,
    "float32 matmul precision": torch.get_float32_matmul_precision,
    "use of deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "a mere warning for the lack of deterministic algorithms": torch.is_deterministic_algorithms_warn_only_enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math attention": torch.backends.cuda.math_sdp_enabled,
    "cudnn attention": torch.backends.cuda.cudnn_sdp_enabled,
    "the order of attention backends": torch._C._get_sdp_priority_order,
    "the fast path of attention modules": torch.backends.mha.get_fastpath_enabled,
    "cudnn": torch._C._get_cudnn_enabled,
    "cudnn's benchmark": torch._C._get_cudnn_benchmark,
    "cudnn's determinism": torch._C._get_cudnn_deterministic,
    "mkldnn": torch._C._get_mkldnn_enabled,
    "einsum's order": lambda: (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
    "the pair of hooks on saved tensors": lambda: tuple(map(_code_of, _top_saved_tensors_hooks(True) or ())),
    "the stack of torch function modes": lambda: _names_of(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
    "the stack of torch dispatch modes": lambda: _names_of(_get_current_dispatch_mode_stack()),
    "the list of hooks on all modules": lambda: tuple(
        hook for name in GLOBAL_HOOKS for hook in (getattr(module_globals, name) or {}).values()
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """Torch's switches and modes as they were."""

    states: tuple[Any, ...]

    @staticmethod
    def now() -> Switches:
        """As they are here and now."""
        return Switches(states=tuple(map(call, _SWITCHES.values())))

    def holds(self) -> bool:
        return tuple(map(call, _SWITCHES.values())) == self.states

    def mismatches(self) -> Iterator[str]:
        for (name, tell), then in zip(_SWITCHES.items(), self.states, strict=True):
            now = tell()
            if now != then:
                yield f"{name} was {_worded(then)} and is {_worded(now)}"


def _worded(state: Any) -> str:
    if isinstance(state, bool):
        return "on" if state else "off"
    if isinstance(state, tuple):
        return f"({', '.join(str(getattr(one, '__name__', getattr(one, 'co_name', one))) for one in state)})"
    return str(state)
