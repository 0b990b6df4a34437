"""Calls of a traced step that run as themselves: nodes of the graph, tried once, on a copy, for what they make."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_slot, track_tensor_tree
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from profiler.errors import CaptureError
from profiler.tracing.eager_ways.live_numbers import LIVE
from profiler.tracing.eager_ways.metrics import Callee, Given, LiveCall, kinds_of, tensors_in, untaken
from profiler.tracing.eager_ways.reads import Reads
from profiler.tracing.guards import Autocast


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """What a call made of real values, on a copy of the object that it belongs to."""

    made: Any
    is_differentiable: bool
    keeps: bool  # whether it holds on to what it was given
    writes: bool  # whether it wrote to that

    @property
    def is_plain(self) -> bool:
        """Whether it made tensors alone, and nothing that a graph cannot hand on."""
        return all(leaf is None or isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(self.made))


class LiveCalls:
    """Records the calls of one trace."""

    def __init__(self, tracer: Any, reads: Reads, stand_in: Callable[[Tensor], Tensor]) -> None:
        self._tracer = tracer
        self._reads = reads
        self._stand_in = stand_in
        self._copies: dict[int, Any] = {}

    def call(self, callee: Callee, args: Any, kwargs: Any) -> Any:
        """What becomes of a call: a node, or where it is a function of nothing traced, or is differentiated, itself."""
        leaves, tree = pytree.tree_flatten((args, kwargs))
        leaves = [self._stand_in(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        nodes = {i: node for i, leaf in enumerate(leaves) if (node := self._node(leaf)) is not None}
        if not nodes and not callee.has_state:
            return self._itself(callee, args, kwargs)
        plain = tuple(None if i in nodes else leaf for i, leaf in enumerate(leaves))
        given = Given(tree, plain, tuple(nodes))
        tried = self._try(callee, given, nodes, leaves)
        if not callee.has_state and (tried.is_differentiable or tried.writes or not tried.is_plain):
            return self._itself(callee, args, kwargs)
        self._refuse(callee, tried)
        return self._recorded(callee, given, list(nodes.values()), tried, [leaves[i] for i in nodes])

    def _itself(self, callee: Callee, args: Any, kwargs: Any) -> Any:
        """The function as it is; those that it calls may still become nodes."""
        return callee.run(*args, **kwargs)

    def _refuse(self, callee: Callee, tried: _Tried) -> None:
        if tried.is_plain and not tried.writes:
            return
        what = "writes to what it is given" if tried.writes else "returns something else than tensors"
        raise CaptureError(
            f"{callee.title} runs as itself inside a planned step, and {what}: call it after the step, with what the "
            "step returns"
        )

    def _node(self, value: Any) -> fx.Node | None:
        if isinstance(value, LIVE):
            return value.source
        slot = get_proxy_slot(value, self._tracer, None) if isinstance(value, Tensor) else None
        return None if slot is None else slot.proxy.node

    # -- trying -------------------------------------------------------------------------------------------------

    def _try(self, callee: Callee, given: Given, nodes: dict[int, fx.Node], leaves: list[Any]) -> _Tried:
        found = self._reads.values(list(nodes.values()))
        trained = [isinstance(leaves[i], Tensor) and leaves[i].requires_grad for i in nodes]
        with _aside():
            values = [_own(value, requires_grad=one) for value, one in zip(found, trained, strict=True)]
            args, kwargs = given.filled(values)
            versions = [value._version for value in values if isinstance(value, Tensor)]
            what = self._copy(callee.what) if callee.has_state else callee.what
            made = Callee(what, callee.method).run(*args, **kwargs)
            return _Tried(
                made=pytree.tree_map_only(Tensor, _own, made),
                is_differentiable=any(tensor.requires_grad for tensor in tensors_in(made)),
                keeps=callee.has_state and _holds(what, values),
                writes=versions != [value._version for value in values if isinstance(value, Tensor)],
            )

    def _copy(self, what: Any) -> Any:
        """A copy that has lived through the calls of this trace."""
        if id(what) not in self._copies:
            self._copies[id(what)] = copy.deepcopy(what)
        return self._copies[id(what)]

    # -- recording ----------------------------------------------------------------------------------------------

    def _recorded(self, callee: Callee, given: Given, nodes: list[fx.Node], tried: _Tried, stand_ins: list[Any]) -> Any:
        made = tensors_in(tried.made)
        autocast = Autocast.now({one.device.type for one in stand_ins if isinstance(one, Tensor)} | {"cpu"})
        target = LiveCall(callee, given, kinds_of(made), autocast, keeps=tried.keeps)
        node: fx.Node = self._tracer.create_node("call_function", target, tuple(nodes), {})
        node.meta["val"] = None
        if not made:
            return tried.made
        fakes = [self._reads.fake(tensor) for tensor in made]
        track_tensor_tree(fakes, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        if not callee.has_state and any(fake.dim() for fake in fakes):
            self._reads.assume_sizes(fakes)
        if tried.is_differentiable:
            trained = [one for one in stand_ins if isinstance(one, Tensor) and one.requires_grad]
            fakes = [_undifferentiated(fake, callee.title, trained) for fake in fakes]
        left = iter(fakes)
        return pytree.tree_map_only(Tensor, lambda _: next(left), tried.made)


def _own(value: Any, *, requires_grad: bool = False) -> Any:
    """A tensor of its own, with the values of this one."""
    return value.detach().clone().requires_grad_(requires_grad) if isinstance(value, Tensor) else value


def _holds(what: Any, values: list[Any]) -> bool:
    """Whether an object has any of these tensors, or what lies in their memory."""
    memory = {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}
    held = pytree.tree_leaves([vars(one) for one in what.modules()])
    return any(isinstance(one, Tensor) and one.untyped_storage()._cdata in memory for one in held)


@contextmanager
def _aside() -> Iterator[None]:
    """The user's own torch and no trace, nor anybody who watches what runs."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), untaken():
            yield
    finally:
        sys.settrace(tracer)


class _Undifferentiated(torch.autograd.Function):
    """Stands for a metric that could be differentiated, and is refused where it is."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, title: str, *trained: Tensor) -> Tensor:
        ctx.title = title
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CaptureError(
            f"the loss depends on what {ctx.title} returned, which runs as itself inside a planned step and cannot be "
            "differentiated there: use the function of that name from torchmetrics.functional"
        )


def _undifferentiated(fake: Tensor, title: str, trained: list[Tensor]) -> Tensor:
    made: Tensor = _Undifferentiated.apply(fake, title, *trained)  # type: ignore[no-untyped-call]
    return made
