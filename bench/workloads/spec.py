"""Which step to run: a model of the zoo or the user's own, with its batch, optimizer and sizes."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bench.workloads.zoo import ZOO, MakeOptimizer, Maker
from planner.errors import PlannerError
from profiler.backend import accelerators
from profiler.tracing.whole_step import TracedStep, capture
from profiler.workload import Workload

DEFAULT_BATCH = {"resnet152": 8, "mobilenet": 16, "gpt2": 4}

DTYPES = ("float32", "bfloat16")

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-4, fused=True),
    "adamw-default": lambda params: torch.optim.AdamW(params, lr=1e-4),
    "adam-default": lambda params: torch.optim.Adam(params, lr=1e-4),
}


class WorkloadError(PlannerError):
    """A model, optimizer or option that cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What to train: enough to make it again. None means the model's own default."""

    model: str = "resnet152"
    source: str = ""  # package.module:make, instead of a model of the zoo
    batch: int | None = None
    image: int | None = None
    seq: int | None = None
    optimizer: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    free_gradients: bool = False  # the planned step ends with `.grad` at None
    early_updates: bool = False  # the planned step updates each parameter once its gradient is complete

    @property
    def batch_size(self) -> int:
        return self.batch if self.batch is not None else DEFAULT_BATCH.get(self.model, 8)

    @property
    def title(self) -> str:
        """The model and every size that is not its default, for tables: 'resnet152 b16 96px'."""
        return " ".join([self.source or self.model, f"b{self.batch_size}", *self._particulars])

    @property
    def title_of_all_batches(self) -> str:
        """The title without the batch size: 'resnet152 96px'."""
        return " ".join([self.source or self.model, *self._particulars])

    @property
    def _particulars(self) -> list[str]:
        sizes = [f"{self.image}px"] if self.image is not None else []
        sizes += [f"s{self.seq}"] if self.seq is not None else []
        sizes += [self.optimizer] if self.optimizer is not None else []
        sizes += [self.dtype] if self.dtype != "float32" else []
        sizes += [f"on {self.device}"] if self.device != "cpu" else []
        sizes += [f"with {' and '.join(self.liberties)}"] if self.liberties else []
        return sizes

    @property
    def liberties(self) -> tuple[str, ...]:
        """What the planned step may do that the plain one does not, in words."""
        chosen = {"freed gradients": self.free_gradients, "early updates": self.early_updates}
        return tuple(words for words, on in chosen.items() if on)

    @property
    def plain(self) -> WorkloadSpec:
        """The same work without liberties: what eager and its neighbours run."""
        return replace(self, free_gradients=False, early_updates=False)

    def at_batch(self, batch: int) -> WorkloadSpec:
        """The same with another batch size."""
        return replace(self, batch=batch)

    def make(self) -> Workload:
        """The train step, model, optimizer and batch; WorkloadError names what cannot be had."""
        device = torch_device(self.device)
        if self.dtype not in DTYPES:
            raise WorkloadError(f"unknown dtype {self.dtype!r}: there are float32 and bfloat16 (autocast)")
        maker = _imported(self.source) if self.source else _from_zoo(self.model)
        options: dict[str, Any] = {}
        for name in ("image", "seq"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if self.optimizer is not None:
            options["optimizer"] = _optimizer(self.optimizer)
        _check_options(maker, options, self.source or self.model)
        made = Workload(*maker(self.batch_size, **options))
        if device.type != "cpu":
            made = made._replace(batch=moved(made.model, made.optimizer, made.batch, device))
        return made._replace(train_step=_with_dtype(made.train_step, self.dtype))

    def capture(self, workload: Workload) -> TracedStep:
        """One graph of a workload that `make` gave, with the liberties that were asked for."""
        return capture(
            *workload,
            name=self.title,
            free_gradients=self.free_gradients,
            early_updates=self.early_updates,
        )


def torch_device(name: str, api: Any = None) -> torch.device:
    """The device of that name; WorkloadError if it is not there. `api` is a stand-in of torch.cuda in tests."""
    kind, colon, number = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind not in accelerators() or (colon and not number.isdigit()):
        known = " and ".join(f"{known} and {known}:N" for known in accelerators())
        raise WorkloadError(f"unknown device {name!r}: there are cpu, {known}")
    there = api or getattr(torch, kind)
    if not there.is_available():
        raise WorkloadError(
            f"--device {name}: this torch ({torch.__version__}) sees no {kind.upper()} device; install a "
            f"{kind.upper()} build of torch, check the driver, or leave out --device to run on the CPU"
        )
    if number and int(number) >= there.device_count():
        raise WorkloadError(
            f"--device {name}: there are {there.device_count()} {kind.upper()} devices, counted from {kind}:0"
        )
    return torch.device(kind, int(number or 0))


def moved(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, device: torch.device) -> Any:
    """Move a model in place and what its optimizer holds of it; the batch is given back on the device."""
    model.to(device)
    if optimizer is not None and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # puts each state where its parameter is now
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _from_zoo(name: str) -> Maker:
    if name not in ZOO:
        raise WorkloadError(f"unknown model {name!r}: there are {', '.join(ZOO)}; your own goes by --import")
    return ZOO[name]


def _optimizer(name: str) -> MakeOptimizer:
    if name not in OPTIMIZERS:
        raise WorkloadError(f"unknown optimizer {name!r}: there are {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def _imported(source: str) -> Maker:
    module_name, colon, name = source.partition(":")
    if not colon:
        raise WorkloadError(f"--import {source!r}: write package.module:make")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Maker = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise WorkloadError(f"--import {source!r}: {error}") from error
    return found


def _check_options(maker: Maker, options: dict[str, Any], name: str) -> None:
    formals = inspect.signature(maker).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in formals.values())
    for option in options:
        if option not in formals and not (takes_any and option == "optimizer"):
            known = ", ".join(n for n in ("image", "seq", "optimizer") if n in formals) or "none"
            raise WorkloadError(f"{name} takes no --{option}; of these options it takes: {known}")


def _with_dtype(step: Callable[[Any, Any, Any], Any], dtype: str) -> Callable[[Any, Any, Any], Any]:
    if dtype == "float32":
        return step

    def autocast_step(model: Any, optimizer: Any, batch: Any) -> Any:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            return step(model, optimizer, batch)

    return autocast_step
