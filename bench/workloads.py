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

from bench.models import ZOO, MakeOptimizer, Maker, Workload
from planner.errors import PlannerError

DEFAULT_BATCH = {"resnet152": 8, "mobilenet": 16, "gpt2": 4}

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

    @property
    def batch_size(self) -> int:
        return self.batch if self.batch is not None else DEFAULT_BATCH.get(self.model, 8)

    @property
    def title(self) -> str:
        """The model and every size that is not its default, for tables: 'resnet152 b16 96px'."""
        return " ".join([self.source or self.model, f"b{self.batch_size}", *self._sizes()])

    @property
    def name(self) -> str:
        """The title without the batch."""
        return " ".join([self.source or self.model, *self._sizes()])

    def _sizes(self) -> list[str]:
        sizes = [f"{self.image}px"] if self.image is not None else []
        sizes += [f"s{self.seq}"] if self.seq is not None else []
        sizes += [self.optimizer] if self.optimizer is not None else []
        sizes += [self.dtype] if self.dtype != "float32" else []
        return sizes

    def at_batch(self, batch: int) -> WorkloadSpec:
        """The same with another batch size."""
        return replace(self, batch=batch)

    @property
    def slug(self) -> str:
        """A name for files; the batch is left out."""
        sizes = (
            self.source or self.model,
            self.image and f"{self.image}px",
            self.seq and f"s{self.seq}",
            self.optimizer,
        )
        return "_".join("".join(c if c.isalnum() else "_" for c in size) for size in sizes if size)

    def make(self) -> Workload:
        """The train step, model, optimizer and batch; WorkloadError names what cannot be had."""
        maker = _imported(self.source) if self.source else _from_zoo(self.model)
        options: dict[str, Any] = {}
        for name in ("image", "seq"):
            if getattr(self, name) is not None:
                options[name] = getattr(self, name)
        if self.optimizer is not None:
            options["optimizer"] = _optimizer(self.optimizer)
        _check_options(maker, options, self.source or self.model)
        step, model, optimizer, batch = maker(self.batch_size, **options)
        return _with_dtype(step, self.dtype), model, optimizer, batch


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
    if dtype != "bfloat16":
        raise WorkloadError(f"unknown dtype {dtype!r}: there are float32 and bfloat16 (autocast)")

    def autocast_step(model: Any, optimizer: Any, batch: Any) -> Any:
        device = next(model.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            return step(model, optimizer, batch)

    return autocast_step
