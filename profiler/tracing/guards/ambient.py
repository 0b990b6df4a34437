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

from profiler.tracing.guards.exact import is_plain, shown
from profiler.tracing.guards.kinds.functions import contents_of
from profiler.tracing.guards.object_walk import GLOBAL_HOOKS


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What tells a function or a value from another, though both are made anew each time."""

    shown: str
    kind: Any  # a function's code, another's type
    inner: tuple[Any, ...]

    def __str__(self) -> str:
        return self.shown


def _told(value: Any, depth: int = 4) -> Any:
    """By what it holds, where that can be seen; an object of the user's by being itself."""
    code = getattr(value, "__code__", None)
    if is_plain(value):
        return _Told(shown=shown(value), kind=type(value), inner=(repr(value),))
    if code is None or not depth:
        return _Told(shown=shown(value), kind=type(value), inner=(_Kept(value),))
    cells = [_told(contents_of(cell), depth - 1) for cell in value.__closure__ or ()]
    defaults = [_told(one, depth - 1) for one in (value.__defaults__ or ())]
    owner = [_Kept(value.__self__)] if hasattr(value, "__self__") else []
    names = ", ".join(f"{name}={cell}" for name, cell in zip(code.co_freevars, cells, strict=True))
    said = f"{code.co_name} with {names}" if names else code.co_name
    return _Told(shown=said, kind=code, inner=(*cells, *defaults, *owner))


class _Kept:
    """An object that is equal to nothing but itself, and stays while it is compared with."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and self._what is other._what

    def __hash__(self) -> int:
        return id(self._what)


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
    "cudnn's TF32": torch._C._get_cudnn_allow_tf32,
    "mkldnn": torch._C._get_mkldnn_enabled,
    "reduced precision in float16 products": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "reduced precision in bfloat16 products": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    "the detection of anomalies": torch.is_anomaly_enabled,
    "the filling of new memory": lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    "einsum's order": lambda: (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
    "the pair of hooks on saved tensors": lambda: tuple(map(_told, _top_saved_tensors_hooks(True) or ())),
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
