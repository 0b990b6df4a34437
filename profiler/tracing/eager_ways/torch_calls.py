"""What becomes of the user's torch calls while they are traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from profiler.tracing.eager_ways.eager_forms import EAGER_FORMS
from profiler.tracing.eager_ways.live_numbers import LIVE, LiveFloat
from profiler.tracing.eager_ways.marks import call_marked
from profiler.tracing.eager_ways.meant_calls import MeantCalls
from profiler.tracing.eager_ways.reads import Reads
from profiler.tracing.fake_tensors.outside_tensors import OutsideTensors, is_real

# Ops that compute with a number, whatever it is, and in which it may therefore stay live.
_COMPUTING = frozenset(
    {
        "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "mul",
        "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__rtruediv__", "__itruediv__", "lerp",
        "lerp_", "fill_", "_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_", "_foreach_mul",
        "_foreach_mul_", "_foreach_div", "_foreach_div_", "_foreach_lerp", "_foreach_lerp_",
    }
)  # fmt: skip

# Those that take a number only, and read it from a tensor if they are given one.
_READING = ("_foreach_lerp", "_foreach_lerp_")


class TorchCalls(MeantCalls):
    """Calls on the user's own tensors act on their stand-ins, and reads of values are answered as in eager.

    Lists of parameters made beforehand work, and so do tensors from anywhere else.
    """

    def __init__(self, stand_ins: Mapping[int, Tensor], outside: OutsideTensors, reads: Reads, graph: fx.Graph) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._outside = outside
        self._reads = reads
        self._graph = graph
        self._readers: dict[Any, Callable[[Tensor], Any]] = {
            Tensor.item: reads.item,
            Tensor.__bool__: reads.truth,
            Tensor.is_nonzero: reads.truth,
            torch.is_nonzero: reads.truth,
            Tensor.__float__: lambda tensor: float(reads.item(tensor)),
            Tensor.__int__: lambda tensor: int(reads.item(tensor)),
            Tensor.__index__: lambda tensor: operator.index(reads.item(tensor)),
            Tensor.tolist: reads.tolist,
            Tensor.numpy: reads.array,
            Tensor.__array__: reads.array,
        }

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What becomes of a call: on stand-ins, with reads answered."""
        swapped: dict[int, Tensor] = {}
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._swap(t, swapped), (args, kwargs))
        result = self._call(func, args, kwargs)
        return swapped.get(id(result), result)  # `buffer += 1` leaves the user's own tensor where it was

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        reader = self._readers.get(func)
        if reader is not None and self._reads.knows(args[0]):
            return reader(args[0])
        form = EAGER_FORMS.get(func)
        if form is not None:
            return form(self._reads.item, *args, **kwargs)
        if getattr(func, "__name__", "") in _READING:
            args = tuple(self._reads.item(arg) if self._is_number(arg) else arg for arg in args)
        live = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LIVE)]
        return self._call_with_numbers(func, args, kwargs, live) if live else func(*args, **kwargs)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor while the step is traced."""
        return self._swap(tensor, {})

    def _swap(self, tensor: Tensor, swapped: dict[int, Tensor]) -> Tensor:
        if not is_real(tensor):
            return tensor
        known = self._stand_ins.get(id(tensor))
        stand_in = self._outside.stand_in(tensor) if known is None else known
        swapped[id(stand_in)] = tensor
        return stand_in

    def _is_number(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() == 1 and self._reads.knows(value)

    # -- live numbers as arguments ----------------------------------------------------------------------------

    def _call_with_numbers(self, func: Callable[..., Any], args: Any, kwargs: Any, live: list[Any]) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
        if recorded or getattr(func, "__name__", "") not in _COMPUTING:  # autograd would keep the number, and hide it
            args, kwargs = pytree.tree_map_only(LIVE, lambda number: number.plain(), (args, kwargs))
            return func(*args, **kwargs)
        kinds = {id(number): (float if isinstance(number, LiveFloat) else int, number.source) for number in live}
        return call_marked(self._graph, func, args, kwargs, kinds)
