"""Proof on the user's own step: the planned one does the same arithmetic, under the predicted peak."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from planner.errors import PlannerError
from planner.units import human_bytes
from profiler.backend import backend_for, is_accelerator
from profiler.measuring.meters import meter_for, peak_above_start
from profiler.measuring.restoring import Touched
from profiler.tracing.ranks.torch_distributed import local
from profiler.workload import device_of

log = logging.getLogger("recompute_planner")

StepFunction = Callable[[Any], Any]
Observed = dict[tuple[str, str], Tensor]


class VerificationError(PlannerError):
    """The planned step differs from the user's; names the first tensor that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was compared over how many steps, and the memory of both versions beyond what was live before."""

    steps: int
    compared: tuple[tuple[str, int], ...]  # kind of tensor -> how many
    largest_difference: float
    first_mismatch: str
    eager_peak_bytes: int
    measured_peak_bytes: int
    predicted_peak_bytes: int

    @property
    def exact(self) -> bool:
        return not self.first_mismatch

    @property
    def prediction_error(self) -> float:
        """Measured less predicted, relative to measured."""
        if not self.measured_peak_bytes:
            return 0.0
        return (self.measured_peak_bytes - self.predicted_peak_bytes) / self.measured_peak_bytes

    def __str__(self) -> str:
        counts = ", ".join(_counted(n, kind) for kind, n in self.compared)
        verdict = "equal to the bit" if self.exact else f"DIFFERENT, first in {self.first_mismatch}"
        return (
            f"{_counted(self.steps, 'steps')}, {counts}: {verdict} (largest difference {self.largest_difference:g}). "
            f"Peak above the start: eager {human_bytes(self.eager_peak_bytes)}, planned "
            f"{human_bytes(self.measured_peak_bytes)} measured, {human_bytes(self.predicted_peak_bytes)} predicted "
            f"({self.prediction_error:+.2%})"
        )


def _counted(number: int, things: str) -> str:
    return f"{number} {things.removesuffix('s') if number == 1 else things}"


def verify(
    eager: StepFunction,
    planned: StepFunction,
    touched: Touched,
    batch: Any,
    *,
    predicted_peak_bytes: int,
    compare_gradients: bool = True,
    steps: int = 3,
) -> Verification:
    """Run both from the same state and generator for a few steps; the user's objects stay as they are.

    `eager` and `planned` take a batch and step the same model and optimizer, those of `touched`. `compare_gradients` is
    off for a planned step that was told to free them.
    """
    expected, actual = (observe(step, touched, batch, steps=steps) for step in (eager, planned))
    return compare(expected, actual, predicted_peak_bytes=predicted_peak_bytes, compare_gradients=compare_gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a few steps leave behind, as copies in main memory, and the peak of the last one.

    The keys are the kind of tensor and its name; the peak is above what was live before that step.
    """

    steps: int
    tensors: dict[tuple[str, str], Tensor]
    peak_bytes: int


def compare(
    expected: Observation, actual: Observation, *, predicted_peak_bytes: int, compare_gradients: bool = True
) -> Verification:
    """What two observations of the same number of steps have in common, bit by bit."""
    skipped = () if compare_gradients else ("gradients",)
    a, b = ({k: v for k, v in seen.tensors.items() if k[0] not in skipped} for seen in (expected, actual))
    mismatch, largest = _compare(a, b)
    kinds: dict[str, int] = {}
    for kind, _ in a:
        kinds[kind] = kinds.get(kind, 0) + 1
    found = Verification(
        steps=expected.steps,
        compared=tuple(kinds.items()),
        largest_difference=largest,
        first_mismatch=mismatch,
        eager_peak_bytes=expected.peak_bytes,
        measured_peak_bytes=actual.peak_bytes,
        predicted_peak_bytes=predicted_peak_bytes,
    )
    log.info("compared with eager: %s", found)
    return found


def _nothing() -> None: ...


def observe(
    step: StepFunction, touched: Touched, batch: Any, *, steps: int, begin: Callable[[], object] = _nothing
) -> Observation:
    """Step a few times and put everything back.

    Seen are what each step returns, every gradient after it, and at the end all else that it touches. The peak is that
    of the last step, begun without the `.grad`s that the step clears anyway. A parameter that has no `.grad` now has
    none when any of the steps begins. `begin` is called before the first step, so that what it makes does not count.
    """
    started, model = time.perf_counter(), touched.model
    seen: Observed = {}
    returned: list[Any] = []
    without = [p for p in model.parameters() if p.grad is None]

    def run() -> Any:
        with touched.watched():
            return context.run(step, batch)

    with touched.kept():
        context = copy_context()  # a context variable that the steps set goes with it
        begin()
        for i in range(steps - 1):
            torch.clear_autocast_cache()  # inside one `with autocast`, eager would go on with the casts of old weights
            _take(seen, i, run(), model)
            _clear(without)
        _clear(touched.unread_gradients)
        torch.clear_autocast_cache()
        peak = peak_above_start(meter_for(device_of(model)), lambda: returned.append(run()))
        _take(seen, steps - 1, returned.pop(), model)
        for kind, name, tensor in _left_behind(touched):
            seen[kind, name] = _copy(tensor)
    log.info(
        "watched %s in %.2f s: at most %s above the start",
        _counted(steps, "steps"),
        time.perf_counter() - started,
        human_bytes(peak),
    )
    return Observation(steps=steps, tensors=seen, peak_bytes=peak)


def _left_behind(touched: Touched) -> Iterator[tuple[str, str, Tensor]]:
    """Everything but gradients and returned values: what they are called, and the tensor."""
    device = device_of(touched.model)
    yield from _state(touched.model, touched.optimizer)
    yield "generators", "CPU generator", torch.get_rng_state()
    if is_accelerator(device):
        backend = backend_for(device)
        yield "generators", f"{backend.title} generator", backend.generator_state()
    for i, generator in enumerate(touched.generators):
        yield "generators", f"generator {i} of the step's own", generator.get_state()
    for i, tensor in enumerate(touched.tensors):
        yield "other tensors", f"tensor {i} that the step writes to", tensor
    for name, value in touched.left.values():
        yield "left values", name, _as_tensor(value)


def _clear(params: Sequence[Tensor]) -> None:
    for p in params:
        p.grad = None


def _take(seen: Observed, i: int, returned: Any, model: nn.Module) -> None:
    for j, leaf in enumerate(pytree.tree_leaves(returned)):
        seen["returned values", f"returned value {j} of step {i + 1}"] = _copy(_as_tensor(leaf))
    for name, p in model.named_parameters():
        if p.grad is not None:
            seen["gradients", f"gradient of {name} after step {i + 1}"] = _copy(p.grad)


def _state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, str, Tensor]]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        yield "parameters", f"parameter {name}", p
    for name, buffer in model.named_buffers():
        yield "buffers", f"buffer {name}", buffer
    for owner, state in (optimizer.state if optimizer is not None else {}).items():
        for key, value in state.items():
            if value is not None:
                yield "optimizer states", f"{key} of {names.get(owner, 'a parameter')}", _as_tensor(value)


def _as_tensor(value: Any) -> Tensor:
    """A number as a tensor of one; what is neither number nor tensor (a text, None) as the bytes that spell it."""
    if isinstance(value, (Tensor, bool, int, float, complex)):
        return torch.as_tensor(value)
    return torch.tensor(list(repr(value).encode()), dtype=torch.uint8)


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).to("cpu", copy=True)  # type: ignore[no-any-return]


def _compare(expected: Observed, actual: Observed) -> tuple[str, float]:
    """The first tensor that is missing or differs in any bit, and the largest difference of all."""
    mismatch, largest = "", 0.0
    for key in (*expected, *(k for k in actual if k not in expected)):
        a, b = expected.get(key), actual.get(key)
        if a is not None and b is not None and same_bits(a, b):
            continue
        mismatch = mismatch or key[1]
        largest = max(largest, _difference(a, b))
    return mismatch, largest


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that also tells -0.0 from 0.0, and takes a NaN for itself."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout == torch.sparse_coo:
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    difference = (a.to_dense().to(wide) - b.to_dense().to(wide)).abs()
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
