"""What a few nodes of a growing trace would hold in eager: what they need of it is run on the user's real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from profiler.backend import backend_for, is_accelerator
from profiler.ops import is_random, memory_of, overload, tensors_of, written
from profiler.tracing.fake_tensors.patches import below_autograd

Read = Callable[[fx.Node], Any]

# Ops that look at their first argument's shape only: what it holds need not be known.
_LIKE = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty",
        "new_zeros", "new_ones", "new_full", "new_empty_strided",
    }
)  # fmt: skip


def slice_of(wanted: Sequence[fx.Node]) -> list[fx.Node]:
    """Everything that has to run for these nodes, in order: who makes what they read, writes to it, or draws before."""
    order = _up_to_last(wanted)
    found = _needed(order, wanted)
    drawing = [node for node in order if is_random(node)]
    if any(is_random(node) for node in found):
        found = _needed(order, [*wanted, *drawing])  # each draw depends on how many there were before it
    return found


def worked_out(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that hold another value at each call: what inputs or draws lead to, also through memory."""
    found, memory = set[fx.Node](), set[int]()
    with outside_the_trace():  # to ask a sparse tensor for its memory is a call
        for node in graph.nodes:
            sources = () if reads_shapes_only(node) else node.all_input_nodes
            mine = _memory([node])
            through = any(key in memory for key in (*_memory(sources), *mine))
            if node.op == "placeholder" or is_random(node) or through or not found.isdisjoint(sources):
                found.add(node)
                memory.update((*mine, *_memory(written(node))))
    return found


def _up_to_last(wanted: Sequence[fx.Node]) -> list[fx.Node]:
    order, missing = list[fx.Node](), set(wanted)
    for node in wanted[0].graph.nodes:
        order.append(node)
        missing.discard(node)
        if not missing:
            break
    return order


def _needed(order: Sequence[fx.Node], wanted: Iterable[fx.Node]) -> list[fx.Node]:
    needed, memory = set(wanted), set[int]()
    for node in reversed(order):
        if node not in needed and not any(key in memory for key in _memory(written(node))):
            continue
        needed.add(node)
        if not reads_shapes_only(node):
            needed.update(node.all_input_nodes)
            memory.update(_memory(node.all_input_nodes))
        memory.update(_memory([node]))
    return [node for node in order if node in needed]


def _memory(nodes: Iterable[fx.Node]) -> list[int]:
    return [memory_of(tensor)._cdata for node in nodes for tensor in tensors_of(node)]


def reads_shapes_only(node: fx.Node) -> bool:
    """Whether an op asks its tensors for their shape alone."""
    op = overload(node)
    return op is not None and op.namespace == "aten" and op.overloadpacket.__name__ in _LIKE


# -- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def outside_the_trace() -> Iterator[None]:
    """Torch as it is when nothing is traced, and without a gradient."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), below_autograd():
        yield


def evaluate(wanted: Sequence[fx.Node], read: Read) -> list[Any]:
    """What the nodes hold in an eager step from the present state; nothing of the user's is changed.

    `read` gives what a placeholder or constant holds.
    """
    nodes = slice_of(wanted)
    with outside_the_trace(), draws_undone(generators_of(nodes, read)):
        values = _Values(nodes, wanted, read)
        for node in nodes:
            values.run(node)
        return [values.held[node] for node in wanted]


@contextmanager
def draws_undone(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Afterwards every one of the generators is as before."""
    saved = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in saved:
            generator.set_state(state)


def generators_of(nodes: Iterable[fx.Node], read: Read) -> list[torch.Generator]:
    """The generators that nodes draw from, the devices' own and the user's."""
    found: dict[int, torch.Generator] = {}
    for node in nodes:
        if is_random(node):
            held = [read(source) for source in node.all_input_nodes if source.op == "get_attr"]
            own = [constant for constant in held if isinstance(constant, torch.Generator)]
            found |= {id(generator): generator for generator in own or _default_generators(node)}
    return list(found.values())


def _default_generators(node: fx.Node) -> list[torch.Generator]:
    devices = {tensor.device for source in (node, *node.all_input_nodes) for tensor in tensors_of(source)}
    beside = [backend_for(device).generator() for device in devices if is_accelerator(device)]
    return beside or [torch.default_generator]


class _Values:
    """Values by node; each goes after its last reader."""

    def __init__(self, nodes: Sequence[fx.Node], wanted: Iterable[fx.Node], read: Read) -> None:
        self.held: dict[fx.Node, Any] = {}
        self._read = read
        self._written = set(_memory(source for node in nodes for source in written(node)))
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._last: dict[fx.Node, list[fx.Node]] = {}
        last = {source: node for node in nodes for source in node.all_input_nodes}
        for source, node in last.items():
            if source not in set(wanted):
                self._last.setdefault(node, []).append(source)

    def run(self, node: fx.Node) -> None:
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._argument(node))
            self.held[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        else:
            self.held[node] = self._own(node)
        for source in self._last.get(node, ()):
            self.held.pop(source, None)

    def _argument(self, node: fx.Node) -> Read:
        return _shape if reads_shapes_only(node) else self.held.__getitem__

    def _own(self, node: fx.Node) -> Any:
        """What the user has there; a copy of it where one of the nodes writes to it."""
        value = self._read(node)
        if not isinstance(value, Tensor) or not self._written.intersection(_memory([node])):
            return value
        storage = memory_of(value)
        copy = self._copies.setdefault(storage._cdata, storage.clone())  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(
            copy, value.storage_offset(), value.shape, value.stride()
        )


def _shape(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
