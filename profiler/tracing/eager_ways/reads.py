"""Reading a tensor's value while the step is traced: answered as eager would be, and noted as what the form assumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from profiler.errors import CaptureError
from profiler.ops import NUMBER, argument, aten, base_name, is_random
from profiler.tracing.eager_ways.live_numbers import LiveFloat, LiveInt
from profiler.tracing.eager_ways.metrics import keeps_state
from profiler.tracing.eager_ways.slices import Read, evaluate, outside_the_trace, slice_of
from profiler.tracing.updates.optimizers import OpaqueStep

# How many numbers a step may read, one by one or in arrays.
MOST_NUMBERS = 1024

# Ops whose results have a shape that depends on values, and which of their arguments decide it.
_DECIDING = {
    "nonzero": ("self",), "_unique2": ("self",), "unique_dim": ("self",), "unique_consecutive": ("self",),
    "masked_select": ("mask",), "index": ("indices",), "repeat_interleave": ("repeats",),
    "_ctc_loss": ("input_lengths", "target_lengths"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """The captured form holds where this node's number is the one that eager saw when it was captured."""

    node: fx.Node
    expected: Any
    line: str


def elements(tensor: Tensor) -> Any:
    """A tensor's numbers, in lists as nested as its shape."""
    return tensor.tolist()


def sizes(*made: Tensor) -> list[list[int]]:
    """The shapes of what an op made."""
    return [list(tensor.shape) for tensor in made]


class Reads:
    """Records what is read of traced tensors, and knows what eager would read there.

    `held` gives what a placeholder or constant of the growing graph holds, and `varies` says of one whether it is
    another at each step; `place` says which line is running; `mode` makes the stand-ins.
    """

    def __init__(
        self,
        tracer: Any,
        held: Read,
        varies: Callable[[fx.Node], bool],
        place: Callable[[], str],
        mode: FakeTensorMode,
    ) -> None:
        self.assumptions: list[Assumption] = []
        self._tracer = tracer
        self._held = held
        self._varies = varies
        self._place = place
        self._mode = mode
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
        needed = slice_of([node])
        if any(isinstance(one.target, OpaqueStep) for one in needed):
            raise CaptureError(
                "the step reads what the optimizer has just computed, and this one runs as itself, which cannot be "
                "taken back where the value leads another way: read it before optimizer.step(), or after the step"
            )
        if any(keeps_state(one) for one in needed):
            raise CaptureError(
                "the step decides by what a metric returned, which keeps state and runs as itself, so that it cannot "
                "be taken back where the value leads another way: return the value and decide after the step"
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

    def values(self, nodes: list[fx.Node]) -> list[Any]:
        """What nodes hold in eager, for who assumes nothing of them."""
        for node in nodes:
            self._refuse_opaque(node)
        return evaluate(nodes, self._held) if nodes else []

    def fake(self, tensor: Tensor) -> Tensor:
        """A stand-in of a tensor's kind."""
        with _disable_current_modes():
            return self._mode.from_tensor(tensor)

    # -- shapes that depend on values -------------------------------------------------------------------------

    def shaped(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        """What an op makes whose shape depends on values; the captured form holds for that shape alone.

        None where the shape is another at nearly every step, so that no captured form would last.
        """
        args, kwargs = pytree.tree_map_only(Tensor, self.node, (args, kwargs))
        node: fx.Node = self._tracer.create_node("call_function", op, args, kwargs)
        if op is not aten.bincount.default and not self._is_settled(op, node):
            self._tracer.graph.erase_node(node)
            return None
        (made,) = evaluate([node], self._held)
        stand_ins = pytree.tree_map_only(Tensor, self.fake, made)
        track_tensor_tree(stand_ins, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        self.assume_sizes([leaf for leaf in pytree.tree_leaves(stand_ins) if isinstance(leaf, Tensor)])
        return stand_ins

    def assume_sizes(self, tensors: list[Tensor]) -> None:
        """The captured form holds where these have the shapes that they have now."""
        self.assumed(self.number(sizes, *map(self.node, tensors)))

    def _is_settled(self, op: OpOverload, node: fx.Node) -> bool:
        """Whether the shape of what a node makes hangs on constants and buffers alone, or is that of everything."""
        deciding = [argument(node, name) for name in _DECIDING.get(base_name(op), ())]
        nodes = [one for one in pytree.tree_leaves(deciding) if isinstance(one, fx.Node)]
        if not nodes:
            return False
        varies = any(is_random(one) or self._varies(one) for one in slice_of(nodes))
        return not varies or _takes_everything(node, evaluate(nodes, self._held))

    @contextmanager
    def nodes_taken_back(self, kind: type[Exception]) -> Iterator[list[Exception]]:
        """An error of this kind inside is noted in the list, and what was recorded until then is taken back."""
        graph, caught = self._tracer.graph, list[Exception]()
        last = next(reversed(graph.nodes), None)
        try:
            yield caught
        except kind as error:
            caught.append(error)
            while (left := next(reversed(graph.nodes), None)) is not last:
                graph.erase_node(left)


def _takes_everything(node: fx.Node, deciding: list[Any]) -> bool:
    """Whether masks leave nothing out, and the longest sequence fills its row, as is so at most steps then."""
    op = node.target
    with outside_the_trace():
        if isinstance(op, OpOverload) and base_name(op) == "_ctc_loss":
            targets: Tensor = argument(node, "targets").meta["val"]
            return targets.dim() == 2 and int(deciding[-1].max()) == targets.shape[1]
        masks = [one for one in deciding if isinstance(one, Tensor) and one.dtype is torch.bool]
        return bool(masks) and all(bool(mask.all()) for mask in masks)


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
        with self._reads.nodes_taken_back(DynamicOutputShapeException) as refusal:
            return func(*args, **kwargs)
        made = self._reads.shaped(func, args, kwargs) if self._may_answer(args, kwargs) else None
        if made is None:
            raise refusal[0]
        return made

    def _may_answer(self, args: Any, kwargs: Any) -> bool:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return any(map(self._reads.knows, tensors))
