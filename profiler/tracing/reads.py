"""Reading a tensor's value while the step is traced: answered as eager would be, and noted as what the form assumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.errors import CaptureError
from profiler.ops import NUMBER, aten
from profiler.tracing.live_numbers import LiveFloat, LiveInt
from profiler.tracing.optimizers import OpaqueStep
from profiler.tracing.slices import Read, evaluate, slice_of

# How many numbers a step may read, one by one or in arrays.
MOST_NUMBERS = 1024


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """The captured form holds where this node's number is the one that eager saw when it was captured."""

    node: fx.Node
    expected: Any
    line: str


def elements(tensor: Tensor) -> Any:
    """A tensor's numbers, in lists as nested as its shape."""
    return tensor.tolist()


class Reads:
    """Records what is read of traced tensors, and knows what eager would read there.

    `held` gives what a placeholder or constant of the growing graph holds; `place` says which line is running.
    """

    def __init__(self, tracer: Any, held: Read, place: Callable[[], str]) -> None:
        self.assumptions: list[Assumption] = []
        self._tracer = tracer
        self._held = held
        self._place = place
        self._known: dict[fx.Node, Any] = {}
        self._numbers = 0

    # -- for live numbers -------------------------------------------------------------------------------------

    def number(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        """A new node for a number that `function` computes of nodes and numbers."""
        self._count(1)
        node: fx.Node = self._tracer.create_node("call_function", function, args, {})
        node.meta[NUMBER] = True
        return node

    def _count(self, numbers: int) -> None:
        self._numbers += numbers
        if self._numbers > MOST_NUMBERS:
            raise CaptureError(
                f"the step reads more than {MOST_NUMBERS} numbers from tensors while it runs (.tolist(), .numpy()): "
                "return the tensor and read it after the step"
            )

    def assumed(self, node: fx.Node) -> Any:
        """What the node's number is in eager; the captured form holds for it alone."""
        if node not in self._known:
            self._refuse_opaque(node)
            (self._known[node],) = evaluate([node], self._held)
            self.assumptions.append(Assumption(node=node, expected=self._known[node], line=self._place()))
        return self._known[node]

    def _refuse_opaque(self, node: fx.Node) -> None:
        if any(isinstance(needed.target, OpaqueStep) for needed in slice_of([node])):
            raise CaptureError(
                "the step reads what the optimizer has just computed, and this one runs as itself, which cannot be "
                "taken back where the value leads another way: read it before optimizer.step(), or after the step"
            )

    # -- what the step may read -------------------------------------------------------------------------------

    def knows(self, value: Any) -> bool:
        """Whether a tensor is traced, and is not one whose values are written in the step's code."""
        slot = get_proxy_slot(value, self._tracer, None) if isinstance(value, Tensor) else None
        return slot is not None and slot.constant is None

    def node(self, tensor: Tensor) -> fx.Node:
        """The node of a traced tensor."""
        node: fx.Node = get_proxy_slot(tensor, self._tracer).proxy.node
        return node

    def item(self, tensor: Tensor) -> Any:
        """`tensor.item()`: a live number; of truth values and complex numbers the value."""
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
        return self._live(self.number(aten._local_scalar_dense.default, self.node(tensor)), tensor.dtype)

    def _live(self, node: fx.Node, dtype: torch.dtype) -> Any:
        if dtype.is_complex or dtype is torch.bool:
            return self.assumed(node)
        return LiveFloat(self, node) if dtype.is_floating_point else LiveInt(self, node)

    def truth(self, tensor: Tensor) -> bool:
        """`bool(tensor)`."""
        if tensor.numel() != 1:
            raise RuntimeError(f"Boolean value of Tensor with {tensor.numel()} values is ambiguous")
        return bool(self.assumed(self.number(aten.is_nonzero.default, self.node(tensor))))

    def tolist(self, tensor: Tensor) -> Any:
        """`tensor.tolist()`, of live numbers."""
        self._count(tensor.numel())
        return self.item(tensor) if tensor.dim() == 0 else [self.tolist(row) for row in tensor.unbind()]

    def array(self, tensor: Tensor) -> Any:
        """`tensor.numpy()`: all of its numbers are assumed."""
        self._count(tensor.numel())
        return _array(self.assumed(self.number(elements, self.node(tensor))), tensor.dtype)

    def answer(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """What an op of torch's that reads values gives in eager."""
        self._count(1)
        args, kwargs = pytree.tree_map_only(Tensor, self.node, (args, kwargs))
        node = self._tracer.create_node("call_function", op, args, kwargs)
        node.meta[NUMBER] = True
        return self.assumed(node)


def _array(values: Any, dtype: torch.dtype) -> Any:
    import numpy

    return numpy.array(values, dtype=str(dtype).removeprefix("torch."))


class ReadsInOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers reads that torch's own code makes, wherever it makes them (a check inside of an op, `float(tensor)`)."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags and self._may_answer(args, kwargs):
            return self._reads.answer(func, args, kwargs)
        return func(*args, **kwargs)

    def _may_answer(self, args: Any, kwargs: Any) -> bool:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return any(map(self._reads.knows, tensors))
