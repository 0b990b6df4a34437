"""What each op of a captured step would take on a device that need not be here: a roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from planner.ir import Graph, Op, Timing, TimingKind
from profiler.capture import TracedStep
from profiler.ops import tensors_of

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the roofline knows of a device. `flops_per_s` holds for every dtype not named in `flops_by_dtype`."""

    name: str
    memory_bytes: int
    flops_per_s: float
    bytes_per_s: float
    launch_us: float
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)

    def flops_for(self, dtype: torch.dtype) -> float:
        return self.flops_by_dtype.get(str(dtype).removeprefix("torch."), self.flops_per_s)


# The fixed roofline on which the solvers are compared; its rates are round numbers, whatever the dtype.
A100 = Device(
    name="an A100 roofline (120 TFLOP/s, 1.3 TB/s, 3 µs an op)",
    memory_bytes=40 * 2**30,
    flops_per_s=120e12,
    bytes_per_s=1.3e12,
    launch_us=3.0,
)


def with_roofline_times(step: TracedStep, device: Device = A100) -> Graph:
    """The step's graph with the times that `device` would need by the roofline."""
    timing = Timing(kind=TimingKind.ESTIMATED, device=device.name)
    return step.graph.with_times(op_times_us(step, device), timing=timing)


def op_times_us(step: TracedStep, device: Device = A100) -> tuple[float, ...]:
    """Per op: the longer of its arithmetic and its memory traffic, and one launch; nothing for a view."""
    return tuple(
        0.0 if is_view(step.graph, op) else _roofline_us(node, device)
        for op, node in zip(step.graph.ops, step.nodes, strict=True)
    )


def is_view(graph: Graph, op: Op) -> bool:
    """Whether an op only makes new names for memory that is there."""
    return bool(op.outputs) and not op.mutates and all(graph.values[v].base is not None for v in op.outputs)


def _roofline_us(node: fx.Node, device: Device) -> float:
    arithmetic_s = flops(node) / device.flops_for(_dtype(node))
    traffic_s = moved_bytes(node) / device.bytes_per_s
    return max(arithmetic_s, traffic_s) * 1e6 + device.launch_us


def _dtype(node: fx.Node) -> torch.dtype:
    made = tensors_of(node)
    return made[0].dtype if made else torch.float32


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the distinct tensors that an op reads and makes."""
    reads = [t for source in node.all_input_nodes for t in tensors_of(source)]
    return sum(t.numel() * t.element_size() for t in (*reads, *tensors_of(node)))


def flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for all else."""
    target = node.target
    if not isinstance(target, OpOverload):
        return 0
    packet = target.overloadpacket
    args, kwargs = _fake((node.args, node.kwargs))
    if packet in _ATTENTION_ON_CPU:
        return _attention_flops(packet, args)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=node.meta["val"]))


# torch's own registry leaves these out.
_ATTENTION_ON_CPU = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


def _attention_flops(packet: Any, args: tuple[Any, ...]) -> int:
    shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*shapes[:3]))  # type: ignore[no-untyped-call]
    return int(sdpa_backward_flop_count(*shapes[:4]))  # type: ignore[no-untyped-call]


def _fake(arguments: Any) -> Any:
    """The arguments of a node with its fake tensors in the place of nodes."""
    return tree_map_only(fx.Node, lambda n: n.meta.get("val"), arguments)
