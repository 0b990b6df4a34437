"""What is known of single ops: what they write, what they draw, how they run again, their in-place forms."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from profiler.backend import is_accelerator
from profiler.collectives import is_wait, why_run_once
from profiler.tracing.updates.optimizers import OpaqueStep

aten = torch.ops.aten

# Key of `node.meta`: the node whose memory this one's tensor lies in, or None where it has its own.
ALIAS_OF = "alias_of"

# Key of `node.meta`: the node makes a Python number, not a tensor.
NUMBER = "number"

# Elementwise ops that the library forgot to tag as such.
_ALSO_POINTWISE = frozenset(
    {"hardswish", "hardswish_backward", "hardsigmoid", "hardsigmoid_backward", "hardtanh", "hardtanh_backward"}
)

# Their kernels add with atomics on a GPU: a second run may round differently.
UNORDERED_ON_CUDA = frozenset(
    {
        "embedding_dense_backward", "index_add", "index_put", "_unsafe_index_put", "scatter_add", "put",
        "histc", "bincount", "cumsum", "max_pool3d_with_indices_backward", "max_pool2d_with_indices_backward",
        "adaptive_avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "avg_pool3d_backward",
        "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_linear1d_backward",
        "upsample_trilinear3d_backward", "reflection_pad1d_backward", "reflection_pad2d_backward",
        "replication_pad2d_backward", "grid_sampler_2d_backward", "nll_loss2d_forward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_flash_attention_backward",
    }
)  # fmt: skip

_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})

# In-place ops that overwrite all of their memory without reading it.
OVERWRITING = frozenset(
    {
        "copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "exponential_", "random_", "log_normal_",
        "cauchy_", "geometric_",
    }
)  # fmt: skip


def fresh(
    op: OpOverload,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """What the overwriting op `op` leaves in new memory: a pure function of its arguments (and of the generator)."""
    memory = torch.empty_strided(size, stride, dtype=dtype, device=device)
    filled: Tensor = op(memory, *args, **kwargs)
    return filled


def overload(node: fx.Node) -> OpOverload | None:
    """The aten overload that a node calls, seen through `fresh`."""
    if node.op != "call_function":
        return None
    target = node.args[0] if node.target is fresh else node.target
    return target if isinstance(target, OpOverload) else None


def target_name(node: fx.Node) -> str:
    """What an op is called in tables: `aten.relu.default`, `fresh aten.bernoulli_.float`, `optimizer_step`."""
    op = overload(node)
    if op is None:
        return str(getattr(node.target, "__name__", node.target))
    return f"fresh {op}" if node.target is fresh else str(op)


def base_name(op: OpOverload) -> str:
    """`add_` for aten.add_.Tensor."""
    return str(op.overloadpacket.__name__)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node only names one output of the multi-output op before it."""
    return node.op == "call_function" and node.target is operator.getitem


def tensors_of(node: fx.Node) -> tuple[Tensor, ...]:
    """The fake tensors that a node makes."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, Tensor)) if isinstance(value, (tuple, list)) else ()


def memory_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage that a tensor lies in; of a sparse one, that of its values."""
    return (tensor._values() if tensor.layout == torch.sparse_coo else tensor).untyped_storage()


def is_dense(value: object) -> bool:
    """Whether a strided tensor's elements fill their memory without gap or overlap, in whatever order."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def argument(node: fx.Node, name: str) -> Any:
    """The argument of an aten node by its name in the schema, or None where it has none of that name."""
    assert isinstance(node.target, OpOverload)
    for position, formal in enumerate(node.target._schema.arguments):
        if formal.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, formal.default_value)
    return None


# -- effects --------------------------------------------------------------------------------------------------


def written(node: fx.Node) -> tuple[fx.Node, ...]:
    """The argument nodes whose memory the op writes to, also where its schema does not admit it."""
    if isinstance(node.target, OpaqueStep):
        return tuple(node.all_input_nodes)
    if not isinstance(node.target, OpOverload):
        return ()
    if _hides_writes(node):
        return tuple(argument(node, n) for n in ("running_mean", "running_var"))
    found: list[fx.Node] = []
    for formal in node.target._schema.arguments:
        if formal.alias_info is not None and formal.alias_info.is_write:
            value = argument(node, formal.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return tuple(n for n in found if isinstance(n, fx.Node))


def _hides_writes(node: fx.Node) -> bool:
    """A batch norm in training that updates its running statistics without saying so in its schema."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema
    if schema.is_mutable or not any(formal.name == "running_mean" for formal in schema.arguments):
        return False
    if "backward" in schema.name or argument(node, "running_mean") is None:
        return False
    return bool(argument(node, "training"))


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from the device's generator."""
    op = overload(node)
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # Attention without dropout draws nothing, whatever its tag says.
    return not (node.target is not fresh and argument(node, "dropout_p") == 0.0)


def own_generators(node: fx.Node) -> tuple[torch.Generator, ...]:
    """The user's generators that the op is told to draw from, instead of the device's own."""
    module = node.graph.owning_module
    held = [getattr(module, str(source.target)) for source in node.all_input_nodes if source.op == "get_attr"]
    return tuple(constant for constant in held if isinstance(constant, torch.Generator))


def has_effect(node: fx.Node) -> bool:
    """Whether the op does anything besides making its outputs."""
    if node.op != "call_function":
        return True
    known = overload(node) is not None or is_getitem(node) or NUMBER in node.meta
    return not known or is_wait(node) or bool(written(node)) or is_random(node) or _returns_nothing(node)


def _returns_nothing(node: fx.Node) -> bool:
    """An op that is run for something else than what it makes: it asserts, or logs."""
    op = overload(node)
    return op is not None and op.namespace != "profiler" and not op._schema.returns


def why_never_rerun(node: fx.Node) -> str:
    """Why a second run of an op without annotated writes would not give the same bits, or ""."""
    op = overload(node)
    if NUMBER in node.meta:
        return "makes a number, which is kept"
    if op is None:
        return "runs the user's own optimizer" if isinstance(node.target, OpaqueStep) else "is not a torch op"
    if op.namespace == "recompute_planner":
        return "stands for what the caller does between forward and backward"
    if own_generators(node):
        return "draws from a generator of the user's"
    if why_run_once(node):
        return why_run_once(node)
    if node.target is not fresh and base_name(op) in _UNINITIALISED:
        return "returns memory that is not initialised"
    beside_cpu = any(is_accelerator(tensor.device) for tensor in tensors_of(node))
    if beside_cpu and base_name(op) in UNORDERED_ON_CUDA:
        return "adds in no fixed order on a GPU"
    return ""


def without_side_effect(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None:
    """Target and arguments of the same op that touches no running statistics; None where there is none."""
    if not isinstance(node.target, OpOverload) or not written(node):
        return None
    if node.target is aten._native_batch_norm_legit.default:
        if not argument(node, "training"):
            return None
        names = ("input", "weight", "bias", "training", "momentum", "eps")
        return aten._native_batch_norm_legit.no_stats, tuple(argument(node, n) for n in names), {}
    if not _hides_writes(node):
        return None
    formals = [formal.name for formal in node.target._schema.arguments]
    args = [None if n in ("running_mean", "running_var") else argument(node, n) for n in formals]
    return node.target, tuple(args), {}


# -- in-place forms -------------------------------------------------------------------------------------------


@cache
def functional_form(op: OpOverload) -> OpOverload | None:
    """aten.add.Tensor for aten.add_.Tensor."""
    name = base_name(op)
    if op.namespace != "aten" or not name.endswith("_") or name.endswith("__"):
        return None
    return _same_arguments(op, getattr(aten, name[:-1], None))


@cache
def inplace_form(op: OpOverload) -> OpOverload | None:
    """The overload that writes the result of elementwise `op` over its first argument: `add_`, or an `out=`."""
    name = base_name(op)
    if op.namespace != "aten" or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if torch.Tag.pointwise not in op.tags and name not in _ALSO_POINTWISE:
        return None
    first = op._schema.arguments[0] if op._schema.arguments else None
    if first is None or str(first.type) != "Tensor" or len(op._schema.returns) != 1 or name == "where":
        return None
    found = _same_arguments(op, getattr(aten, f"{name}_", None))
    if found is None:
        found = _same_arguments(op, op.overloadpacket)
    # A generated variant computes elsewhere and copies: it saves nothing.
    return None if found is None or torch.Tag.generated in found.tags else found


@cache
def out_form(op: OpOverload) -> OpOverload | None:
    """The overload that computes the same into memory that it is given (`out=`), by the same kernel; or None."""
    if op.namespace != "aten" or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    found = _same_arguments(op, op.overloadpacket)
    if found is None or torch.Tag.generated in found.tags:
        return None
    outs = [formal for formal in found._schema.arguments if formal.is_out]
    return found if len(outs) == len(op._schema.returns) else None


def _same_arguments(op: OpOverload, packet: Any) -> OpOverload | None:
    if packet is None:
        return None
    candidates = [getattr(packet, name) for name in packet.overloads()]
    matching = (c for c in candidates if c is not op and _formals(c) == _formals(op))
    return next(matching, None)


def _formals(op: OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


def inplace_target(node: fx.Node) -> OpOverload | None:
    """The op that does the node's work in the memory of its first argument, to the same bits, or None."""
    op = node.target
    if not isinstance(op, OpOverload) or inplace_form(op) is None or not node.args:
        return None
    into = node.args[0]
    if not isinstance(into, fx.Node) or not _same_memory_shape(into.meta.get("val"), node.meta.get("val")):
        return None
    # Another argument that looks at the same memory in another way would read what was just overwritten.
    others = [other for other in node.all_input_nodes if other is not into and _shares_storage(other, into)]
    if any(geometry(other) != geometry(into) for other in others):
        return None
    return inplace_form(op)


def inplace_call(node: fx.Node) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Target and arguments of the node's in-place form; only where `inplace_target` has one."""
    target = inplace_target(node)
    assert target is not None, f"{node.name} has no in-place form"
    outs = {formal.name: node.args[0] for formal in target._schema.arguments if formal.is_out}
    return target, node.args, {**node.kwargs, **outs}


def _same_memory_shape(into: Any, out: Any) -> bool:
    if not isinstance(into, Tensor) or not isinstance(out, Tensor):
        return False
    if not is_dense(into) or not is_dense(out) or into.device != out.device:
        return False
    return into.dtype == out.dtype and into.shape == out.shape and into.stride() == out.stride()


def storage_root(node: fx.Node) -> fx.Node:
    """The node that made the memory in which a node's tensor lies."""
    while node.meta.get(ALIAS_OF) is not None:
        node = node.meta[ALIAS_OF]
    return node


def _shares_storage(a: fx.Node, b: fx.Node) -> bool:
    return storage_root(a) is storage_root(b)


def geometry(node: fx.Node) -> tuple[Any, ...]:
    """Shape, strides and offset of a node's tensor within its memory."""
    value = node.meta["val"]
    if value.layout != torch.strided:
        return tuple(value.shape), value.layout
    return tuple(value.shape), value.stride(), value.storage_offset()
