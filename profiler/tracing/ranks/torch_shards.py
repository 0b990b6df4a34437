"""What fully_shard keeps to itself and a capture has to know: its units, their parameters, its hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.ranks.torch_distributed import gone, has_group


@dataclass(frozen=True, kw_only=True)
class ShardedParam:
    """A parameter of which every rank holds some rows, by the modules that have it."""

    places: tuple[tuple[nn.Module, str], ...]
    whole_size: torch.Size
    padded_size: torch.Size  # of one rank's rows, the same on all
    own_size: torch.Size

    def is_even(self, ranks: int) -> bool:
        """Whether every rank has as many rows."""
        return self.whole_size[0] == ranks * self.padded_size[0]


@dataclass(frozen=True, kw_only=True)
class ShardedUnit:
    """A module whose parameters are gathered before its forward, and whose gradients are reduced together."""

    module: nn.Module
    params: tuple[ShardedParam, ...]
    group: Any
    own: Any  # torch's record of it

    @property
    def reduces(self) -> bool:
        """Whether a backward reduces its gradients now."""
        return bool(self.own.reduce_grads)


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model or to parts of it."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not module.FSDPModule.__subclasses__():  # asked before every forward: it makes a class of each
        return False
    return any(isinstance(m, module.FSDPModule) for m in model.modules())


def refuse_part_of_shards(model: nn.Module) -> None:
    """CaptureError for a sharded part of a sharded model: a trial of the part alone would let go of the whole."""
    if not is_sharded(model):
        return
    from torch.distributed.fsdp import FSDPModule

    roots = [_state_of(module)._is_root for module in model.modules() if isinstance(module, FSDPModule)]
    if False in roots and True not in roots:
        raise CaptureError(
            "this model is a part of one that fully_shard was applied to as well, which gathers and lets go for all of "
            "its parts: plan the whole, checkpoint_model(whole_model, budget=...)"
        )


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """What `fully_shard` was applied to, with the parameters of each."""
    from torch.distributed.fsdp import FSDPModule

    try:
        return [
            ShardedUnit(
                module=module,
                params=tuple(_sharded_param(p) for p in unit.fsdp_params),
                group=unit.mesh_info.shard_process_group,
                own=unit,
            )
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for unit in _state_of(module)._fsdp_param_groups
        ]
    except AttributeError as error:
        raise gone("list of fully_shard's parameters") from error


def _state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def _sharded_param(record: Any) -> ShardedParam:
    info = record._module_info
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    return ShardedParam(
        places=tuple(places),
        whole_size=record._orig_size,
        padded_size=record.padded_sharded_param_size,
        own_size=record.sharded_size,
    )


def remove_own_hooks(model: nn.Module) -> None:
    """Take fully_shard's hooks off all modules; whoever keeps the modules' attributes puts them on again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = _state_of(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                del hooks[key]


@contextmanager
def refusing_own_gathers() -> Iterator[None]:
    """Inside, what fully_shard gathers itself is refused: the hooks of the model that is captured are off."""
    if "torch.distributed.fsdp" not in sys.modules:
        yield
        return
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        raise gone("list of fully_shard's parameters") from error

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise CaptureError(
            "the step calls another sharded model than the one it was given, or gathers parameters by itself "
            "(unshard()), which is not captured: make both models parts of one, and leave gathering to the plan"
        )

    beginnings = [(FSDPState, "_lazy_init"), (FSDPParamGroup, "lazy_init"), (FSDPParamGroup, "unshard")]
    with patched([(place, name, refuse) for place, name in beginnings]):  # before they note stand-ins as their own
        yield


GATHERS = "gathers_parameters"  # an attribute of a hook that stands for one of fully_shard's own


def _shards(module: Any, hook: Any) -> bool:
    """Whether a hook of a module is there to gather its parameters or to let go of them."""
    if hasattr(hook, GATHERS):
        return True
    return getattr(hook, "__self__", None) is _state_of(module)


def _own_root_hooks(model: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a model itself by which its parameters are gathered, before and after its forward."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not isinstance(model, module.FSDPModule):
        return {}, {}
    tables = (model._forward_pre_hooks, model._forward_hooks)
    before, after = ({key: hook for key, hook in table.items() if _shards(model, hook)} for table in tables)
    return before, after


def forward_with_gathers(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A model's own forward without the hooks on it, but for those that gather its parameters."""
    before, after = _own_root_hooks(model)
    for hook in before.values():
        args, kwargs = hook(model, args, kwargs) or (args, kwargs)
    returned = model.forward(*args, **kwargs)
    for hook in after.values():
        changed = hook(model, args, returned)
        returned = returned if changed is None else changed
    return returned


class RootGathers:
    """The hooks by which a model's own parameters are gathered, taken off around a call that plans it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks = _own_root_hooks(model)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, they are off; whoever runs the forward puts them `back` meanwhile."""
        tables = (self._model._forward_pre_hooks, self._model._forward_hooks)
        before = [dict(table) for table in tables]
        self._off()
        try:
            yield
        finally:
            for table, hooks in zip(tables, before, strict=True):
                kept = {key: hook for key, hook in table.items() if key not in hooks}
                table.clear()
                table.update(hooks | kept)

    @contextmanager
    def back(self) -> Iterator[None]:
        """Inside, they are on."""
        tables = (self._model._forward_pre_hooks, self._model._forward_hooks)
        for table, hooks in zip(tables, self._hooks, strict=True):
            others = dict(table)
            table.clear()
            table.update(hooks | others)
        try:
            yield
        finally:
            self._off()

    def _off(self) -> None:
        for table, hooks in zip((self._model._forward_pre_hooks, self._model._forward_hooks), self._hooks, strict=True):
            for key in hooks:
                table.pop(key, None)


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters that a forward without a backward has left."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not has_group():  # asked before every forward: most models are nobody's shards
        return
    for part in model.modules():
        if isinstance(part, module.FSDPModule):
            part.reshard()


def free_whole_parameters(model: nn.Module) -> None:
    """Free whole parameters that are gathered no more, where putting a trial's writes back has filled them."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is None or not has_group():
        return
    for part in model.modules():
        if not isinstance(part, module.FSDPModule):
            continue
        for unit in _state_of(part)._fsdp_param_groups:
            if unit.is_sharded:
                for parameter in unit.fsdp_params:
                    parameter.free_unsharded_param()


def why_not_sharded(model: nn.Module) -> str:
    """What of a sharded model is not captured, by name, or ""."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, None] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            found |= dict.fromkeys(_why_not_unit(module))
    return ", ".join(found)


def _why_not_unit(module: Any) -> Iterator[str]:
    state = _state_of(module)
    if len(state._modules) > 1:
        yield "several modules in one call of fully_shard (apply it to each)"
    for unit in state._fsdp_param_groups:
        refusals = {
            "replicas of shards (HSDP: a mesh of two dimensions)": unit._is_hsdp,
            "a mixed-precision policy (use torch.autocast inside the step, which is captured)": any(
                (unit.mp_policy.param_dtype, unit.mp_policy.reduce_dtype, unit.mp_policy.output_dtype)
            ),
            "an offload policy": type(unit.offload_policy).__name__ != "OffloadPolicy",
            "an all-reduce hook": unit._all_reduce_hook is not None,
            "its own gather or reduction": type(unit._all_gather_comm).__name__ != "DefaultAllGather"
            or type(unit._reduce_scatter_comm).__name__ != "DefaultReduceScatter",
            "a gradient divide factor": unit.gradient_divide_factor is not None or unit.force_sum_reduction_for_comms,
            "a second group for reductions": unit.mesh_info.reduce_scatter_process_group is not None,
            "shards of another dimension than the first": any(p.fsdp_placement.dim for p in unit.fsdp_params),
            "parameters that are distributed tensors themselves": any(p.is_dtensor for p in unit.fsdp_params),
            "parameters that are gathered in their own way": any(
                hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in unit.fsdp_params
            ),
            "parameters of another type than float32 or bfloat16": any(
                p.sharded_param.dtype not in (torch.float32, torch.bfloat16) for p in unit.fsdp_params
            ),
        }
        yield from (name for name, is_there in refusals.items() if is_there)
