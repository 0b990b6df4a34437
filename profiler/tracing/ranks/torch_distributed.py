"""What torch.distributed keeps to itself and a capture has to know: private names are here and in `torch_shards`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_impls

from profiler.collectives import operators
from profiler.errors import CaptureError
from profiler.tracing.fake_tensors.patches import patched


def has_group() -> bool:
    """Whether this process has any others to speak to."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gone(what: str) -> CaptureError:
    return CaptureError(
        f"torch {torch.__version__} has no {what} any more, which planning a distributed step reads: use the version "
        "of torch that constraints.txt names, or plan the bare module"
    )


def is_replicated(model: nn.Module) -> bool:
    """Whether a model is wrapped in DistributedDataParallel."""
    return dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel)


def wrapped(ddp: Any) -> nn.Module:
    """The model inside its wrapper."""
    inner: nn.Module = ddp.module
    return inner


# -- DistributedDataParallel --------------------------------------------------------------------------------------


def bucket_bytes(ddp: Any, device: torch.device) -> int:
    """What a reducer's buckets take on a device beside the gradients, told without making others of their size."""
    if "reducer" not in vars(ddp) or ddp.gradient_as_bucket_view:  # they are the gradients' own memory
        return 0
    ignored = ddp.parameters_to_ignore
    reduced = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored]
    return sum(p.numel() * p.element_size() for p in reduced if p.device == device)


def reducer_buckets(ddp: Any) -> tuple[bool, list[list[Tensor]]]:
    """The parameters of each bucket in the order of its memory, and whether these are the last ones.

    Until its first backward has ended and the second forward begins, the reducer has others.
    """
    try:
        buckets = [bucket.parameters() for bucket in ddp.reducer._get_zeros_like_grad_buckets()]
        return bool(ddp._has_rebuilt_buckets), buckets
    except AttributeError as error:
        raise gone("list of DistributedDataParallel's buckets") from error


def rebuilt_buckets(ddp: Any, ready: Sequence[Tensor]) -> list[list[int]]:
    """The buckets that the reducer makes after its first backward, as positions in the order of ready gradients."""
    try:
        config = ddp._bucket_config
        limits = list(config.per_bucket_bytes_caps) or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
        buckets, _ = dist._compute_bucket_assignment_by_size(list(ready), limits)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise gone("rule by which DistributedDataParallel fills its buckets") from error
    return [list(bucket) for bucket in buckets]


def has_rebuilt_buckets(ddp: Any) -> bool:
    """Whether the reducer has the buckets that it keeps."""
    return bool(ddp._has_rebuilt_buckets)


def syncs_buffers(ddp: Any) -> bool:
    """Whether the next forward begins with rank 0's buffers."""
    own = vars(ddp)
    wanted = own.get("forward_sync_buffers", own.get("broadcast_buffers"))
    return bool(wanted and ddp.require_forward_param_sync)


def moved(ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call on the device that the wrapped model was given."""
    if not ddp.device_ids:
        return args, kwargs
    from torch.distributed.utils import _to_kwargs

    device = torch.device(ddp.device_type, ddp.device_ids[0])
    all_args, all_kwargs = _to_kwargs(args, kwargs, device, ddp.use_side_stream_for_tensor_copies)
    return all_args[0], all_kwargs[0]


def why_not_replicated(ddp: Any) -> str:
    """What of a wrapped model is not captured, by name, or ""."""
    own = vars(ddp)
    world = dist.get_world_size(ddp.process_group)
    uneven_views = ddp.gradient_as_bucket_view and world & (world - 1)
    refusals = {
        "find_unused_parameters": (ddp.find_unused_parameters, "which gradients are summed would depend on the data"),
        "static_graph": (ddp.static_graph, "its first steps reduce otherwise than later ones"),
        "a comm hook": (own.get("_comm_hooks"), "what it does to gradients is not seen"),
        "a buffer hook": (own.get("buffer_hook"), "what it does to buffers is not seen"),
        "mixed_precision": (own.get("mixed_precision"), "use torch.autocast inside the step, which is captured"),
        "batched_grad_copy": (own.get("batched_grad_copy"), "it divides where the plain reducer multiplies"),
        "skip_all_reduce_unused_params": (own.get("skip_all_reduce_unused_params"), "all gradients are summed"),
        "delay_all_reduce_named_params": (own.get("_delay_all_reduce_params"), "all gradients are summed in buckets"),
        "parameters or buffers to ignore": (own.get("parameters_to_ignore"), "all of them are kept equal"),
        "the Python reducer": (own.get("_use_python_reducer"), "it belongs to torch.compile"),
        "join()": (getattr(own.get("_join_config"), "enable", False), "ranks that have ended run no step"),
        "gradient_as_bucket_view with a number of ranks that is no power of two": (
            uneven_views,
            "it divides in one step and multiplies in another",
        ),
    }
    found = [f"{name} ({reason})" for name, (is_there, reason) in refusals.items() if is_there]
    return ", ".join(found)


# -- functional collectives -----------------------------------------------------------------------------------------


@contextmanager
def waits_alias() -> Iterator[None]:
    """`wait_tensor` returns its argument; its shape function says new memory, whose bytes would count twice."""
    table, op = fake_impls.op_implementations_dict, operators().wait_tensor.default
    if op in table:
        yield
        return
    table[op] = lambda mode, func, tensor: tensor.view_as(tensor)
    try:
        yield
    finally:
        del table[op]


# How long a wait stays for gloo's threads to let go of what they have sent: they do so in microseconds, or as soon as a
# busy machine lets them run.
_LONGEST_S = 0.2
_PAUSE_S = 5e-5


def settled_wait(tensor: Tensor, *sent: Tensor, is_new: bool = False) -> Tensor:
    """Wait for a collective, and until nobody but the caller holds its tensors.

    A thread of gloo's wakes the caller first and frees what it was given later: by then the caller may have allocated
    more, over the peak that was planned. `sent` is what the launch was given. Of a tensor that the collective has made
    (`is_new`) gloo holds views, so that its memory is asked as well.
    """
    done: Tensor = operators().wait_tensor(tensor)
    if tensor.device.type == "cpu":
        deadline = time.perf_counter() + _LONGEST_S
        while _are_held(tensor, sent, is_new=is_new) and time.perf_counter() < deadline:
            time.sleep(_PAUSE_S)  # which lets them
    return done


def _are_held(tensor: Tensor, sent: Sequence[Tensor], *, is_new: bool) -> bool:
    if any(map(_is_held_elsewhere, (tensor, *sent))):
        return True
    if not is_new:
        return False
    memory: Any = tensor.untyped_storage()
    holders: int = torch._C._storage_Use_Count(memory._cdata)
    return holders > 2  # the tensor, and the name just above


def _is_held_elsewhere(tensor: Any) -> bool:
    """Whether somebody beside Python holds a tensor."""
    return bool(tensor._use_count() > 1)


def has_own_reduce_scatter(group: Any) -> bool:
    """Whether a group's backend reduces to shards itself; gloo sums a copy of everything and keeps its rows of that."""
    return str(dist.get_backend(group)) != "gloo"


_OWN_CALLS = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "reduce",
    "gather", "scatter", "barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier",
)  # fmt: skip

BY_ITSELF = (
    "the step communicates with other processes by itself ({}), which is not captured: do so outside of it, on what it "
    "returns"
)


@contextmanager
def refusing_own_communication() -> Iterator[None]:
    """Inside, torch.distributed's calls are refused: on tensors without memory they would send nothing, and be lost."""
    if not dist.is_available():
        yield
        return

    def refusing(name: str) -> Any:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise CaptureError(BY_ITSELF.format(f"torch.distributed.{name}"))

        return refuse

    places = (dist, dist.distributed_c10d)
    calls = [(place, name, refusing(name)) for place in places for name in _OWN_CALLS if hasattr(place, name)]
    with patched([*calls, (nn.parallel.DistributedDataParallel, "forward", refuse_another_wrapped)]):
        yield


def refuse_another_wrapped(*args: Any, **kwargs: Any) -> None:
    """CaptureError for a wrapped model that is not the one whose step is captured."""
    raise CaptureError(
        "the step calls another model that is wrapped in DistributedDataParallel than the one it was given, and what "
        "that sends is not captured: call the model inside of it (its .module), or wrap one that has both as parts"
    )


# -- groups ---------------------------------------------------------------------------------------------------------


def store_of(group: Any) -> Any:
    """The store by which the processes of a group found each other."""
    try:
        from torch.distributed.distributed_c10d import _get_process_group_store

        return _get_process_group_store(group)
    except (ImportError, AttributeError) as error:
        raise gone("store of a process group") from error


def timeout_s(group: Any, device: torch.device) -> float:
    """How long a collective of the group waits for the other ranks."""
    try:
        seconds: float = group._get_backend(device).options._timeout.total_seconds()
        return seconds
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout.total_seconds()


def size_of(group_name: str) -> int:
    """The number of ranks of a group, by its name."""
    try:
        find: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
        return dist.get_world_size(find(group_name))
    except AttributeError as error:
        raise gone("way to find a process group by its name") from error


def begin_fake_group(ranks: int) -> None:
    """Make this process rank 0 of a group of which the others are not there: nothing is ever sent."""
    try:
        from torch.testing._internal.distributed import fake_pg  # which registers the backend
    except ImportError as error:
        raise gone("group of processes that are not there (fake_pg)") from error
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=ranks)


@contextmanager
def alone_in_group() -> Iterator[None]:
    """Inside, DistributedDataParallel is made without asking other ranks, which are not there, for their parameters."""
    from torch.nn.parallel import distributed

    names = ("_verify_param_shape_across_processes", "_sync_module_states")
    if not all(hasattr(distributed, name) for name in names):
        raise gone("comparison of parameters in DistributedDataParallel")
    with patched([(distributed, name, lambda *args, **kwargs: None) for name in names]):
        yield


def is_fake(group: Any) -> bool:
    """Whether a group only looks like one: its other ranks are not there."""
    return str(dist.get_backend(group)) == "fake"


# -- distributed tensors ----------------------------------------------------------------------------------------------


def is_distributed(tensor: object) -> bool:
    """Whether a tensor is one of several processes, of which each holds a part."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Any) -> Any:
    """The part of a distributed tensor that this process holds; all others as they are."""
    return tensor._local_tensor if is_distributed(tensor) else tensor


def spec_of(tensor: Any) -> Any:
    """How a distributed tensor is laid out; None for all others."""
    return tensor._spec if is_distributed(tensor) else None


def layout_of(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    """The mesh of a distributed tensor, and how it lies on each dimension of it."""
    return tensor.device_mesh, tuple(tensor.placements)


def distributed(part: Tensor, spec: Any, *, requires_grad: bool = False) -> Tensor:
    """A distributed tensor of this part; the part itself where there is no layout."""
    if spec is None:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor(part, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]
