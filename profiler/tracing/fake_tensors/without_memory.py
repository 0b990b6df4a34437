"""Tensors that have a shape and no memory: what is made of them can be captured at any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn import init

from planner.errors import PlannerError
from profiler.errors import CaptureError, explain
from profiler.tracing.fake_tensors.eager_layouts import EagerLayouts
from profiler.tracing.fake_tensors.patches import generators_kept, patched
from profiler.tracing.ranks.torch_distributed import local


@contextmanager
def without_memory() -> Iterator[None]:
    """Every tensor made inside is a fake one on its device; the random generators are as before afterwards."""
    with generators_kept(), _no_initial_values(), EagerLayouts(allow_non_fake_inputs=True):
        yield


@contextmanager
def _no_initial_values() -> Iterator[None]:
    """The functions of torch.nn.init do nothing: there is nothing to fill, and some of them read what they filled."""

    def untouched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor

    public = {name: value for name, value in vars(init).items() if not name.startswith("_")}
    filling = [name for name, value in public.items() if name.endswith("_") and callable(value)]
    with patched((init, name, untouched) for name in filling):
        yield


def made_without_memory(make: Callable[[int], Any], batch_size: int) -> Any:
    """What `make(batch_size)` gives, of fake tensors; CaptureError where it needs the values of some."""
    try:
        with without_memory():
            return make(batch_size)
    except PlannerError:  # it says itself what is wrong
        raise
    except Exception as error:
        reads = "it reads a tensor's value, and these have none" if _reads_values(error) else ""
        raise CaptureError(
            "the workload cannot be made of tensors without memory (make it of real ones, if it fits here): "
            + explain(error, why=reads)
        ) from error


def _reads_values(error: Exception) -> bool:
    return isinstance(error, DataDependentOutputException)


def fake_mode_of(model: nn.Module) -> FakeTensorMode | None:
    """The mode of the model's fake tensors; None where all are real, CaptureError where only some are."""
    named = [(name, local(tensor)) for name, tensor in chain(model.named_parameters(), model.named_buffers())]
    fakes = [tensor for _, tensor in named if isinstance(tensor, FakeTensor)]
    if not fakes:
        return None
    real = next((name for name, tensor in named if not isinstance(tensor, FakeTensor)), None)
    if real is not None:
        raise CaptureError(f"{real} is a real tensor and others of the model are fake: make all of one kind")
    modes = {id(tensor.fake_mode): tensor.fake_mode for tensor in fakes}
    if len(modes) > 1:
        raise CaptureError("the model's fake tensors are of several modes: make them all in one `without_memory()`")
    return next(iter(modes.values()))
