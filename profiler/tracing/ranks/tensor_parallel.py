"""Tensor parallel: parameters of which each process holds a slice, and ops that communicate to compute with them.

Distributed tensors run their ops on the parts that a process holds, and send what they lack by functional collectives:
what is traced are those parts and collectives, so that nothing has to be put in the place of anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from profiler.tracing.ranks import torch_distributed as private
from profiler.tracing.ranks.parallel import Communicating
from profiler.tracing.ranks.torch_shards import is_sharded, sharded_units


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether parameters of a model are distributed tensors that fully_shard did not make."""
    return any(map(private.is_distributed, model.parameters())) and not is_sharded(model)


def is_in_parts(model: nn.Module) -> bool:
    """Whether each process holds only a part of some parameters, in whatever way."""
    return is_sharded(model) or is_tensor_parallel(model)


def why_not_tensor_parallel(model: nn.Module) -> str:
    """What of a tensor-parallel model is not captured, by name, or ""."""
    found: dict[str, None] = {}
    meshes = set()
    for param in filter(private.is_distributed, model.parameters()):
        mesh, placements = private.layout_of(param)
        meshes.add(mesh)
        if mesh.ndim > 1:
            found["a mesh of several dimensions"] = None
        if not all(one.is_replicate() or (one.is_shard() and one.dim < 2) for one in placements):
            found["parameters that are neither whole nor slices of their first two dimensions"] = None
    if len(meshes) > 1:
        found["several meshes"] = None
    return ", ".join(found)


class Slices(Communicating):
    """Nothing is added but what a wait is: ops of distributed tensors communicate by themselves."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A wait returns what was launched."""
        with private.waits_alias():
            yield


def group_of(model: nn.Module) -> Any:
    """The process group that a model communicates in, by whatever it is wrapped or made of; None for a plain one."""
    if private.is_replicated(model):
        replicas: Any = model
        return replicas.process_group
    if is_sharded(model):
        units = sharded_units(model)
        return units[0].group if units else None
    param = next(filter(private.is_distributed, model.parameters()), None)
    return None if param is None else private.layout_of(param)[0].get_group(0)
