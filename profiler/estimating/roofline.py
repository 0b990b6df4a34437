"""What each op of a captured step would take on a device that need not be here.

`estimated` is the cost model for a device by name: times, workspaces and rounded storages. `with_roofline_times` is the
plain roofline without any allowance, on which solvers are compared; it stays as it is, so that their tables do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from planner.group_link import with_group_link
from planner.ir import Graph, Op, Timing, TimingKind
from planner.scaling import along
from planner.schedule import unplanned_schedule
from profiler.estimating.devices import A100, Device, Workspace
from profiler.estimating.kinds import LOOKUPS, OpKind, kind_of
from profiler.ops import argument, base_name, memory_of, overload, tensors_of, written
from profiler.tracing.whole_step import TracedStep

__all__ = [
    "A100", "Device", "OpCost", "estimated", "flops", "is_view", "moved_bytes", "op_costs", "op_times_us",
    "side_bytes", "traffic_bytes", "with_costs", "with_roofline_times",
]  # fmt: skip

aten = torch.ops.aten


# -- the estimate for a device ----------------------------------------------------------------------------------------


def estimated(step: TracedStep, device: Device) -> Graph:
    """The step's graph as `device` is expected to run it: op times, workspaces, and storages in the allocator's blocks.

    Views are free and nothing is fused. The fingerprint is the captured graph's own only where blocks are of one byte.
    """
    return with_costs(step.graph, op_costs(step), device)


def with_costs(graph: Graph, costs: Sequence[OpCost | None], device: Device) -> Graph:
    """`graph` as `device` is expected to run it, where these are the costs of its ops; None is a view.

    What several of them do together takes what their link allows, where it is known.
    """
    ops = tuple(op if cost is None else cost.op_on(device, op) for op, cost in zip(graph.ops, costs, strict=True))
    storages = tuple(
        s if (nbytes := device.rounded(s.nbytes)) == s.nbytes else replace(s, nbytes=nbytes) for s in graph.storages
    )
    timing = Timing(kind=TimingKind.ESTIMATED, device=device.name)
    found = replace(graph, ops=ops, storages=storages, timing=timing)
    return found.validate() if device.group_link is None else with_group_link(found, device.group_link)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What an op does, on whatever device. Each figure is affine in the batch; the time made from them is not."""

    kind: OpKind
    dtype: torch.dtype
    flops: float
    traffic_bytes: float
    read_bytes: float
    made_bytes: float
    new_bytes: tuple[float, ...]  # of each storage that it makes, unless it runs in the memory of an input

    def op_on(self, device: Device, op: Op) -> Op:
        """The longer of arithmetic and traffic, what new memory takes, and one launch; and the op's workspace."""
        arithmetic_s = self.flops / device.reached_flops(self.dtype, self.kind)
        traffic_s = self.traffic_bytes / device.reached_bytes(self.kind)
        new_s = sum(device.new_memory_s(nbytes) for nbytes in self.new_bytes)
        side = math.ceil(max(self.read_bytes, self.made_bytes))  # as `side_bytes` has it
        workspace = device.workspaces.get(self.kind, Workspace()).nbytes(side)
        time_us = (max(arithmetic_s, traffic_s) + new_s) * 1e6 + device.launch_us
        return replace(op, time_us=time_us, workspace_bytes=device.rounded(workspace))

    def towards(self, other: OpCost, share: float) -> OpCost:
        """The cost on the straight line through this one (share 0) and another (share 1), never below nothing."""
        return replace(
            self,
            flops=along(self.flops, other.flops, share),
            traffic_bytes=along(self.traffic_bytes, other.traffic_bytes, share),
            read_bytes=along(self.read_bytes, other.read_bytes, share),
            made_bytes=along(self.made_bytes, other.made_bytes, share),
            new_bytes=tuple(along(a, b, share) for a, b in zip(self.new_bytes, other.new_bytes, strict=True)),
        )


def op_costs(step: TracedStep) -> tuple[OpCost | None, ...]:
    """The cost of every op of a captured step; None for a view."""
    graph, in_place = step.graph, _runs_in_place(step.graph)
    return tuple(
        None if is_view(graph, op) else _op_cost(graph, op, node, in_place=op.id in in_place)
        for op, node in zip(graph.ops, step.nodes, strict=True)
    )


def _runs_in_place(graph: Graph) -> frozenset[int]:
    """The ops that the unplanned step runs in the memory of an input: they make none."""
    return frozenset(run.op for run in unplanned_schedule(graph).runs if run.into is not None)


def _op_cost(graph: Graph, op: Op, node: fx.Node, *, in_place: bool) -> OpCost:
    return OpCost(
        kind=kind_of(node),
        dtype=_input_dtype(node),
        flops=_flops(node),
        traffic_bytes=traffic_bytes(node),
        read_bytes=_read_bytes(node),
        made_bytes=_made_bytes(node),
        new_bytes=() if in_place else tuple(graph.storages[s].nbytes for s in graph.makes[op.id]),
    )


def _flops(node: fx.Node) -> int:
    """As `flops`, but right for convolutions in groups: for their backward, torch's formula forgets the groups."""
    if not isinstance(node.target, OpOverload) or node.target.overloadpacket is not aten.convolution_backward:
        return flops(node)
    if argument(node, "groups") == 1 or argument(node, "transposed"):
        return flops(node)
    (grad,), (weight,) = (tensors_of(argument(node, name)) for name in ("grad_output", "weight"))
    wanted = argument(node, "output_mask")[:2]  # each of both gradients takes as many as the forward
    return int(2 * grad.numel() * weight[0].numel() * sum(wanted))


def traffic_bytes(node: fx.Node) -> int:
    """Bytes that an op reads and writes: of a broadcast tensor what is there, of a table the rows looked up."""
    looked_up = (op := overload(node)) is not None and base_name(op) in LOOKUPS
    made = sum(_bytes(t) for t in tensors_of(node))
    overwritten = sum(_bytes(t) for n in written(node) for t in tensors_of(n))
    read = [min(_bytes(t), memory_of(t).nbytes()) for n in node.all_input_nodes for t in tensors_of(n)]
    if looked_up:
        read = [min(nbytes, made) for nbytes in read]
    return sum(read) + max(made, overwritten)


def side_bytes(node: fx.Node) -> int:
    """The larger of both sides of an op, all that it reads or all that it makes: what workspaces are measured by."""
    return max(_read_bytes(node), _made_bytes(node))


def _read_bytes(node: fx.Node) -> int:
    return sum(_bytes(t) for n in node.all_input_nodes for t in tensors_of(n))


def _made_bytes(node: fx.Node) -> int:
    return sum(_bytes(t) for t in tensors_of(node))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _input_dtype(node: fx.Node) -> torch.dtype:
    """The dtype of an op's arithmetic: that of its first floating-point input."""
    read = (t.dtype for n in node.all_input_nodes for t in tensors_of(n))
    return next((dtype for dtype in read if dtype.is_floating_point), torch.float32)


# -- the fixed roofline -----------------------------------------------------------------------------------------------


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
