"""Which optimizers trace to the same bits, how their lazy state is made, and the opaque step of all others."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizer_module
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched, threads_of_this, with_subclasses
from profiler.tracing.guards import Autocast, global_step_hooks, own_step
from profiler.tracing.ranks.torch_distributed import distributed, spec_of
from profiler.tracing.trials.undoing import watched
from profiler.workload import NoOptimizer

# Fused kernels take the learning rate as a number and do their corrections inside, from a step counter that
# is a tensor: traced, they are the very call that eager makes.
_FUSED = (Adam, AdamW, Adagrad)


def why_opaque(optimizer: Optimizer) -> str:
    """Why the optimizer must run as itself, or "" where its trace computes eager's own bits.

    Decided by what the optimizer is, never by trying numbers: exactly SGD in every form with a number for its
    rate, and the fused forms of Adam, AdamW and Adagrad.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, NoOptimizer):
        return "the step has no optimizer"
    known = type(optimizer) in (*_FUSED, SGD)
    if own_step(optimizer) is not type(optimizer).step or (known and not _is_torchs(type(optimizer).step)):
        return f"the step of {kind} was replaced by another, which must run"
    if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(optimizer, "_optimizer_step_post_hooks", None):
        return f"{kind} has step hooks, which must run"
    if global_step_hooks():
        return "a global optimizer step hook is registered, which must run"
    if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
        return f"{kind} is driven by a gradient scaler"
    reasons = (_why_opaque_group(optimizer, group) for group in optimizer.param_groups)
    return next((reason for reason in reasons if reason), "")


def _is_torchs(step: Callable[..., Any]) -> bool:
    """Whether a step is one that comes with torch, below what its hooks and modes wrap around it."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and code.co_filename.startswith(os.path.dirname(optimizer_module.__file__))


def _why_opaque_group(optimizer: Optimizer, group: dict[str, Any]) -> str:
    kind = type(optimizer).__name__
    numbers = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if any(isinstance(v, Tensor) for value in numbers.values() for v in _flat(value)):
        return f"{kind} has a tensor among its hyperparameters"
    if group.get("differentiable"):
        return f"{kind} is differentiable"
    if type(optimizer) in _FUSED and not group["fused"]:
        return f"{kind} reads its step counter as a Python number unless fused=True"
    if type(optimizer) not in (*_FUSED, SGD):
        return f"{kind} is not known to trace to the same bits"
    if not isinstance(group["lr"], Real):
        return f"{kind} has a {type(group['lr']).__name__} for its learning rate"
    if type(optimizer) is SGD and _skips_dampening(optimizer, group):
        return "SGD leaves dampening out of its very first step"
    return ""


def _skips_dampening(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether some parameter's momentum begins with the next step, which then leaves dampening out."""
    if group["momentum"] == 0 or group["dampening"] == 0:
        return False
    buffers = [optimizer.state.get(p, {}).get("momentum_buffer") for p in group["params"] if p.requires_grad]
    return any(buffer is None for buffer in buffers)


def _flat(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def make_lazy_state(optimizer: Optimizer, params: Sequence[Tensor]) -> None:
    """Give `params` the state that the optimizer's own next step would give them; none that have it change.

    Uses the optimizer's own code, with a stand-in of the gradient's shape. SGD alone makes its state in the
    middle of the arithmetic: its first `buf = grad` is `buf = momentum * buf + grad` on a buffer of -0.0,
    because -0.0 + x is x, to the bit, for every x.
    """
    fresh = {id(p) for p in params}
    for group in optimizer.param_groups:
        wanted = [p for p in group["params"] if id(p) in fresh]
        if wanted and isinstance(optimizer, SGD):
            _make_momentum(optimizer, group, wanted)
        elif wanted:
            _run_init_group(optimizer, group, wanted)


def first_state(optimizer: Optimizer, groups: Any, state: Any) -> dict[Tensor, dict[str, Any]]:
    """The state that an optimizer with these groups and this state would have once its lazy part is made.

    Neither the optimizer nor its state change.
    """
    copy: Any = object.__new__(type(optimizer))
    copy.__dict__ = {**vars(optimizer), "param_groups": [dict(group) for group in groups]}
    copy.state = defaultdict(dict, {p: dict(inner) for p, inner in state.items()})
    make_lazy_state(copy, [p for group in groups for p in group["params"] if p.requires_grad])
    return dict(copy.state)


def _make_momentum(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> None:
    if group["momentum"] == 0 or group["dampening"] != 0:
        return
    for p in params:
        if optimizer.state[p].get("momentum_buffer") is None:
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, -0.0, requires_grad=False)


def _run_init_group(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> None:
    init = getattr(type(optimizer), "_init_group", None)
    if init is None or not init.__module__.startswith("torch.optim"):
        return  # its state stays lazy: an opaque step makes it, uncounted the first time
    stateless = [p for p in params if not optimizer.state.get(p)]
    lists: list[list[Any]] = [[] for _ in list(inspect.signature(init).parameters)[2:]]
    with patched((p, "grad", p.detach()) for p in stateless), torch.no_grad():
        init(optimizer, {**group, "params": stateless}, *lists)


class _HasTensor(Protocol):
    """A place that a live parameter is read from."""

    def tensor(self) -> Tensor: ...


class OpaqueStep:
    """One call of the user's `optimizer.step()` inside a graph: gradients in, everything else in place.

    It runs in the mixed precision that was around it at capture: it is the user's code, not a graph with casts in it.
    """

    __name__ = "optimizer_step"
    __qualname__ = "optimizer_step"

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        receivers: Sequence[_HasTensor],
        everyone: Sequence[_HasTensor],
        autocast: Sequence[Autocast] = (),
    ) -> None:
        self._optimizer = optimizer
        self._autocast = tuple(one for one in autocast if one.dtype is not None)
        self._receivers = tuple(receivers)
        self._everyone = tuple(everyone)

    def __call__(self, params: Sequence[Tensor], grads: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        """Step with exactly these gradients; `params` and `state` only say what is read and written."""
        everyone = [slot.tensor() for slot in self._everyone]
        before = [param.grad for param in everyone]
        for param in everyone:
            param.grad = None
        for slot, grad in zip(self._receivers, grads, strict=True):
            param = slot.tensor()
            param.grad = distributed(grad, spec_of(param))
        with ExitStack() as stack:
            for one in self._autocast:
                stack.enter_context(torch.autocast(one.device_type, dtype=one.dtype))
            stack.enter_context(watched())
            self._optimizer.step()
        # The graph, not the optimizer, decides how long a gradient lives.
        for param, grad_before in zip(everyone, before, strict=True):
            param.grad = grad_before


@contextmanager
def refusing_schedulers() -> Iterator[None]:
    """A scheduler that steps inside is refused before it changes anything: its counters cannot be replayed."""

    mine = threads_of_this()

    def unless_elsewhere(method: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            if not mine():
                return method(scheduler, *args, **kwargs)
            raise CaptureError(
                f"{type(scheduler).__name__}.step() is called inside the train step; call it after the step "
                "instead: the learning rate is read anew each time"
            )

        return refuse

    with patched(with_subclasses(LRScheduler, ("step",), unless_elsewhere)):
        yield


@contextmanager
def refusing_scalers() -> Iterator[None]:
    """An enabled gradient scaler may scale the loss, and is refused where it decides; a disabled one does nothing."""

    mine = threads_of_this()

    def unless_enabled(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled() and mine():
                raise CaptureError(
                    f"{type(scaler).__name__} decides by the values of the gradients whether the optimizer steps, "
                    "which a graph cannot do: plan forward and backward only, checkpoint(forward_backward, model, "
                    "None, batch, ...) with scaler.scale(loss).backward() in it, and leave scaler.step and "
                    "scaler.update after it; or use bfloat16 autocast, which needs no scaler. One made with "
                    "enabled=False may stay"
                )
            return method(scaler, *args, **kwargs)

        return call

    made: list[GradScaler] = []

    def with_live_scale(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(scaler: GradScaler, outputs: Any) -> Any:
            if scaler.is_enabled() and scaler._scale is None and mine():
                first = next(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
                with _disable_current_modes():  # a real tensor, as eager's first call makes it, not one of the trace
                    scaler._lazy_init_scale_growth_tracker(first.device)
                made.append(scaler)
            return method(scaler, outputs)

        return call

    with (
        patched(with_subclasses(GradScaler, ("unscale_", "step", "update"), unless_enabled)),
        patched(with_subclasses(GradScaler, ("scale",), with_live_scale)),
    ):
        try:
            yield
        except BaseException:
            for scaler in made:
                scaler._scale = scaler._growth_tracker = None
            raise
