"""Cleaning a traced graph: no machinery, no in-place op where a functional one does, every output a node.

After `clean`, every tensor node carries in `meta["alias_of"]` the argument whose memory it shares, or None.
That relation is taken from the storages of the trace and kept up through every edit, so that nothing has to
be propagated again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from planner.ir import Phase
from profiler.errors import CaptureError
from profiler.ops import (
    ALIAS_OF,
    OVERWRITING,
    argument,
    aten,
    base_name,
    fresh,
    functional_form,
    geometry,
    has_effect,
    is_dense,
    is_getitem,
    memory_of,
    storage_root,
    tensors_of,
    written,
)
from profiler.tracing.fx_graphs.provenance import GRADIENT_OF, META, origin_of

_IDENTITIES = (aten.detach.default, aten.detach_.default, aten.alias.default)

# Ops that look at their first argument's shape only, and the number they fill with (None: nothing).
_LIKE: dict[str, float | None] = {
    "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1, "empty_like": None, "new_empty": None,
    "new_empty_strided": None, "full_like": 0, "new_full": 0,
}  # fmt: skip


def clean(module: fx.GraphModule) -> None:
    """Bring the traced graph into the form that `lift` and the rewriter read; the bits it computes stay."""
    graph = module.graph
    _remove_machinery(graph)
    _merge_constants(graph)
    _recognise_constants(module)
    _remove_dead_code(graph)
    _name_every_output(graph)
    _note_aliases(graph)
    _forget_shapes_only_readers(graph)
    _make_functional(graph)
    _remove_dead_code(graph)
    graph.lint()
    module.recompile()


def settle_memory(module: fx.GraphModule) -> None:
    """What `clean` does to a graph that is functional already, and whose ops another compiler has to know."""
    graph = module.graph
    _remove_machinery(graph)
    _name_every_output(graph)
    _note_aliases(graph)
    graph.lint()
    module.recompile()


# -- machinery ------------------------------------------------------------------------------------------------


def _remove_machinery(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.target in _IDENTITIES:
            source = node.args[0]
            if GRADIENT_OF in node.meta:
                source.meta[GRADIENT_OF] = node.meta[GRADIENT_OF]
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif isinstance(node.target, OpOverload) and node.target.namespace == "profiler":
            graph.erase_node(node)


def _merge_constants(graph: fx.Graph) -> None:
    first: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        kept = first.setdefault(node.target, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _recognise_constants(module: fx.GraphModule) -> None:
    """Show a tensor from outside as the stand-in that ops saw of it: what they return may lie in its memory."""
    values = [node.meta.get("val") for node in module.graph.nodes]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    for node in module.graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        if mode is not None and isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
            node.meta["val"] = mode.from_tensor(tensor)


def _remove_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        # The outputs of an op are named by nodes beside it, wanted or not: they go only together with it.
        elif not has_effect(node) and not is_getitem(node) and all(_is_dead_name(u) for u in node.users):
            for name in list(node.users):
                graph.erase_node(name)
            graph.erase_node(node)


def _is_dead_name(node: fx.Node) -> bool:
    return is_getitem(node) and not node.users


def _name_every_output(graph: fx.Graph) -> None:
    """A getitem node, right behind its op, for each tensor of a multi-output op: unread ones take memory too."""
    for node in list(graph.nodes):
        outputs = node.meta.get("val")
        if is_getitem(node) or not isinstance(outputs, (tuple, list)):
            continue
        named = {user.args[1]: user for user in node.users}
        last = node
        for index, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                if index in named:
                    graph.erase_node(named[index])  # None: an output that was not asked for
                continue
            if index in named:
                last.append(named[index])
            else:
                with graph.inserting_after(last):
                    named[index] = graph.call_function(operator.getitem, (node, index))
                named[index].meta = {"val": output, META: node.meta[META]}
            last = named[index]


# -- aliases --------------------------------------------------------------------------------------------------


def _note_aliases(graph: fx.Graph) -> None:
    owners: dict[int, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "output" or not isinstance(value, Tensor):
            continue
        key = memory_of(value)._cdata
        takes = node.args[0].all_input_nodes if is_getitem(node) else node.all_input_nodes
        if key not in owners:
            owners[key] = node
            node.meta[ALIAS_OF] = None
        elif node.op in ("placeholder", "get_attr"):
            node.meta[ALIAS_OF] = owners[key]
        else:
            node.meta[ALIAS_OF] = _aliased(node, key, takes, owners[key])


def _aliased(node: fx.Node, key: int, takes: Iterable[fx.Node], owner: fx.Node) -> fx.Node:
    for source in takes:
        if any(memory_of(tensor)._cdata == key for tensor in tensors_of(source)):
            return source
    if is_getitem(node) and is_getitem(owner) and owner.args[0] is node.args[0]:
        return owner
    raise CaptureError(
        f"op {node.name} ({node.target}) returns the memory of {owner.name}, which it is not given: "
        "such hidden sharing cannot be captured"
    )


def _children(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    children: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        source = node.meta.get(ALIAS_OF)
        if source is not None:
            children.setdefault(source, []).append(node)
    return children


# -- ops that read nothing but a shape --------------------------------------------------------------------------


def _forget_shapes_only_readers(graph: fx.Graph) -> None:
    """`zeros_like(x)` keeps x alive for its shape: make it a constant of that shape."""
    for node in list(graph.nodes):
        op = node.target
        if not isinstance(op, OpOverload) or base_name(op) not in _LIKE or not is_dense(node.meta["val"]):
            continue
        fill = argument(node, "fill_value") if "full" in base_name(op) else _LIKE[base_name(op)]
        if isinstance(fill, fx.Node):
            continue
        with graph.inserting_before(node):
            new = graph.create_node("call_function", *_constant(node.meta["val"], fill), base_name(op))
        _take_over(graph, node, new)


def _constant(value: Tensor, fill: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    size, stride = tuple(value.shape), tuple(value.stride())
    if fill is None:
        where = {"dtype": value.dtype, "device": value.device}
        return aten.empty_strided.default, (size, stride), where
    return fresh, (aten.fill_.Scalar, size, stride, value.dtype, value.device, fill), {}


def _take_over(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    for user in list(old.users):
        for view in _tensor_nodes(user):
            if view.meta.get(ALIAS_OF) is old:
                view.meta[ALIAS_OF] = new
    old.replace_all_uses_with(new)
    graph.erase_node(old)


def _tensor_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The node itself, and the names of its outputs."""
    return (node, *(user for user in node.users if is_getitem(user)))


# -- in-place to functional -------------------------------------------------------------------------------------


class _Functionalizer:
    """Replaces in-place ops on memory that the step made itself, rewiring whoever looks at it afterwards."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.children = _children(graph)

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if self._may_replace(node):
                self._try_replace(node)

    def _may_replace(self, node: fx.Node) -> bool:
        op = node.target
        if not isinstance(op, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
            return False
        if origin_of(node).phase is Phase.OPTIMIZER:
            return False  # there the memory is what matters, and nothing is ever recomputed
        writes = written(node)
        if len(writes) != 1 or not node.args or writes[0] is not node.args[0]:
            return False
        if storage_root(node).op in ("placeholder", "get_attr"):
            return False  # the user's own memory: buffers and incoming gradients do change
        return base_name(op) in OVERWRITING or functional_form(op) is not None

    def _try_replace(self, node: fx.Node) -> None:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        stale = [alias for alias in self._family(target) if self._later_users(alias, node)]
        if any(self._view_chain(alias, target) is None for alias in stale):
            return  # seen through views that the new tensor cannot be given
        new = self._functional(node, target)
        if new is None:
            return
        for alias in stale:
            self._redirect(alias, self._rebuild(alias, target, new), after=node)
        self._redirect(node, new, after=node)
        self.children[node.meta[ALIAS_OF]].remove(node)
        self.graph.erase_node(node)

    def _family(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that lie in the same memory."""
        found = [storage_root(node)]
        for member in found:
            found.extend(self.children.get(member, ()))
        return found

    def _later_users(self, alias: fx.Node, node: fx.Node) -> list[fx.Node]:
        if self.position[alias] >= self.position[node]:
            return []
        return [user for user in alias.users if self.position[user] > self.position[node]]

    def _view_chain(self, alias: fx.Node, target: fx.Node) -> list[fx.Node] | None:
        """The views that lead from a tensor that looks like `target` to `alias`; None where there are none."""
        chain: list[fx.Node] = []
        here: fx.Node | None = alias
        while here is not None:
            if geometry(here) == geometry(target):
                return chain[::-1]
            if is_getitem(here) or here.op != "call_function" or written(here):
                return None
            chain.append(here)
            here = here.meta[ALIAS_OF]
        return None

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node | None:
        op, value = node.target, target.meta["val"]
        assert isinstance(op, OpOverload)
        if not is_dense(value):
            return None
        if base_name(op) in OVERWRITING:
            size, stride = tuple(value.shape), tuple(value.stride())
            args = (op, size, stride, value.dtype, value.device, *node.args[1:])
            return self._insert(node, fresh, args, value)
        form = functional_form(op)
        assert form is not None
        if not self._keeps_geometry(form, node, value):
            return None
        return self._insert(node, form, node.args, value)

    def _keeps_geometry(self, form: OpOverload, node: fx.Node, value: Tensor) -> bool:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with value.fake_mode:  # type: ignore[attr-defined]
            out = form(*args, **kwargs)
        return bool(out.dtype == value.dtype and out.shape == value.shape and out.stride() == value.stride())

    def _insert(self, node: fx.Node, target: Any, args: tuple[Any, ...], value: Tensor) -> fx.Node:
        assert isinstance(node.target, OpOverload)
        name = base_name(node.target).rstrip("_")
        with self.graph.inserting_before(node):
            new = self.graph.create_node("call_function", target, args, dict(node.kwargs), name)
        with value.fake_mode:  # type: ignore[attr-defined]
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        new.meta = {**node.meta, "val": made, ALIAS_OF: None}
        self.position[new] = self.position[node]
        return new

    def _rebuild(self, alias: fx.Node, target: fx.Node, new: fx.Node) -> fx.Node:
        """The same view of the new tensor."""
        chain = self._view_chain(alias, target)
        assert chain is not None
        here = new
        for view in chain:
            source = view.meta[ALIAS_OF]
            with self.graph.inserting_after(here):
                copy = self.graph.node_copy(view, lambda n, s=source, h=here: h if n is s else n)  # type: ignore[misc]
            copy.meta = {**view.meta, ALIAS_OF: here, META: new.meta[META]}
            self.position[copy] = self.position[new]
            self.children.setdefault(here, []).append(copy)
            here = copy
        return here

    def _redirect(self, old: fx.Node, new: fx.Node, *, after: fx.Node) -> None:
        for user in list(old.users):
            if self.position[user] <= self.position[after]:
                continue
            user.replace_input_with(old, new)
            for view in _tensor_nodes(user):
                if view.meta.get(ALIAS_OF) is old:
                    view.meta[ALIAS_OF] = new
                    self.children[old].remove(view)
                    self.children.setdefault(new, []).append(view)


def _make_functional(graph: fx.Graph) -> None:
    _Functionalizer(graph).run()
