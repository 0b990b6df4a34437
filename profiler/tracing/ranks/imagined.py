"""A rank of a cluster that is not here: what it would capture, in one process and without sending anything."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.ranks import torch_distributed as private
from profiler.workload import Workload


class Sharding(Enum):
    """How ranks share the work."""

    DDP = "ddp"  # every rank holds the whole model
    FSDP2 = "fsdp2"  # every rank holds some rows of each parameter


@contextmanager
def imagined_group(ranks: int) -> Iterator[Any]:
    """The mesh of so many ranks, of which this process is the first: of uneven shards it has the largest."""
    if not dist.is_available():
        raise CaptureError("this torch was built without torch.distributed: several ranks cannot be imagined")
    if dist.is_initialized():
        raise CaptureError("this process is a rank of a group already: imagine others in a process of its own")
    with patched([(sys, "excepthook", sys.excepthook)]):  # a group puts the rank before every line of it, for good
        private.begin_fake_group(ranks)
        try:
            from torch.distributed.device_mesh import init_device_mesh

            yield init_device_mesh("cpu", (ranks,))
        finally:
            dist.destroy_process_group()


def shared_out(workload: Workload, sharding: Sharding, mesh: Any) -> Workload:
    """The workload as a rank of `mesh` has it; CaptureError where its model cannot be shared out so."""
    if not any(p.requires_grad for p in workload.model.parameters()):
        raise CaptureError(f"the model has no parameter to train, so that {sharding.value} has nothing to share out")
    try:
        if sharding is Sharding.DDP:
            with private.alone_in_group():
                return workload._replace(model=nn.parallel.DistributedDataParallel(workload.model))
        return _sharded(workload, mesh)
    except CaptureError:
        raise
    except Exception as error:  # whatever torch has against this model
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CaptureError(f"the model cannot be shared out by {sharding.value}: {first}") from error


def _sharded(workload: Workload, mesh: Any) -> Workload:
    from torch.distributed.fsdp import fully_shard

    model = workload.model
    places = {id(param): name for name, param in model.named_parameters()}
    for unit in (*units(model), model):
        fully_shard(unit, mesh=mesh)
    if workload.optimizer is not None:
        _hand_over(workload.optimizer, places, dict(model.named_parameters()))
    return workload


def units(model: nn.Module) -> tuple[nn.Module, ...]:
    """What is gathered together: the repeated blocks of a model, the outermost ones; all else goes with the whole."""
    found: list[nn.Module] = []
    _collect(model, found)
    return tuple(found)


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    kinds = [type(child) for child in module.children() if any(True for _ in child.parameters())]
    for child in module.children():
        repeated = isinstance(module, nn.ModuleList | nn.Sequential) and kinds.count(type(child)) > 1
        if repeated and any(True for _ in child.parameters()):
            found.append(child)
        else:
            _collect(child, found)


def _hand_over(optimizer: Optimizer, places: dict[int, str], now: dict[str, nn.Parameter]) -> None:
    """Give an optimizer that was made of whole parameters their shards."""
    if optimizer.state:
        raise CaptureError("the optimizer has state of whole parameters already: make it anew, unused")
    for group in optimizer.param_groups:
        strange = [param for param in group["params"] if id(param) not in places]
        if strange:
            raise CaptureError(
                f"the optimizer holds a tensor of shape {list(strange[0].shape)} that is no parameter of the model, "
                "which is not sharded"
            )
        group["params"] = [now[places[id(param)]] for param in group["params"]]
