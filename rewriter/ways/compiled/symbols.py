"""Sizes that are symbols: a graph at the sizes it was captured with, and at any others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir import Graph, Storage
from planner.scaling import with_times_of
from profiler.ops import ALIAS_OF, NUMBER, aten, fresh, is_getitem, memory_of
from profiler.tracing.fx_graphs.provenance import META
from rewriter.ways.compiled import seams

# Key of `node.meta`: what `val` was before symbols were replaced by their hints.
SYMBOLIC = "symbolic_val"


def at_hints(module: fx.GraphModule) -> bool:
    """Give every node a `val` of concrete sizes, as they were when it was captured; whether there are symbols.

    The graph is run anew without memory: passes over a graph leave `val`s behind whose storages no longer tell who
    shares whose memory.
    """
    dynamic = False
    with seams.fake_tensors():
        for node in module.graph.nodes:
            before = node.meta[SYMBOLIC] = node.meta.get("val")
            if node.op == "placeholder":
                dynamic |= seams.is_symbol(before)
                node.meta["val"] = _concrete(before)
            elif node.op == "get_attr":
                node.meta["val"] = getattr(module, str(node.target))
            elif seams.is_symbol(before):
                node.meta["val"] = seams.hint_of(before)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
            if node.op == "call_function" and isinstance(node.meta["val"], (int, float, bool)):
                node.meta[NUMBER] = True
    return dynamic


def _concrete(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return seams.hint_of(value)
    size, stride = ([seams.hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


# -- formulas ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formula:
    """A size as a function of symbols; called with them in order. Fit for a node's target."""

    text: str
    symbols: tuple[str, ...]

    @property
    def __name__(self) -> str:
        return "size"

    def __call__(self, *numbers: int) -> int:
        return int(_compiled(self)(*numbers))

    @staticmethod
    def of(size: Any) -> Formula:
        """The formula of a symbolic size; of a plain number, that number."""
        if not isinstance(size, torch.SymInt):
            return Formula(str(int(size)), ())
        return Formula(*seams.formula_of(size))


_functions: dict[Formula, Callable[..., Any]] = {}


def _compiled(formula: Formula) -> Callable[..., Any]:
    if formula not in _functions:
        source = f"lambda {', '.join(formula.symbols)}: {formula.text}"
        _functions[formula] = eval(source, seams.names_in_formulas())
    return _functions[formula]


def make_sizes_live(module: fx.GraphModule) -> None:
    """Where an op was given the size that a tensor had, give it the size that the tensor will have."""
    sizes = _Sizes(module)
    for node in list(module.graph.nodes):
        symbolic = node.meta.get(SYMBOLIC)
        if not isinstance(symbolic, Tensor) or not any(map(seams.is_symbol, (*symbolic.shape, *symbolic.stride()))):
            continue
        at = {fresh: 1, aten.empty_strided.default: 0}.get(node.target)
        if at is not None:
            live = (sizes.nodes(symbolic.shape), sizes.nodes(symbolic.stride()))
            node.args = (*node.args[:at], *live, *node.args[at + 2 :])
    module.recompile()


class _Sizes:
    """Nodes that compute sizes from the graph's own symbols, each made once, where the graph begins."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph
        inputs = self.graph.find_nodes(op="placeholder")
        self.symbols = {str(node.meta[SYMBOLIC]): node for node in inputs if seams.is_symbol(node.meta[SYMBOLIC])}
        self.last = inputs[-1]
        self.made: dict[Formula, fx.Node] = {}

    def nodes(self, sizes: Any) -> tuple[Any, ...]:
        return tuple(self._node(size) if seams.is_symbol(size) else int(size) for size in sizes)

    def _node(self, size: torch.SymInt) -> fx.Node:
        formula = Formula.of(size)
        symbol: fx.Node | None = self.symbols.get(formula.text)
        if symbol is not None:
            return symbol
        if formula not in self.made:
            with self.graph.inserting_after(self.last):
                args = tuple(self.symbols[name] for name in formula.symbols)
                made = self.last = self.graph.create_node("call_function", formula, args, {}, "size")
            origin = next(n.meta[META] for n in self.graph.nodes if META in n.meta)
            made.meta = {"val": seams.hint_of(size), SYMBOLIC: size, NUMBER: True, META: origin, ALIAS_OF: None}
            self.made[formula] = made
        return self.made[formula]


def _symbolic(node: fx.Node) -> Any:
    """What a node was captured with; a name that was put beside an op has it from the op."""
    if SYMBOLIC in node.meta or not is_getitem(node):
        return node.meta.get(SYMBOLIC)
    whole = node.args[0].meta.get(SYMBOLIC)  # type: ignore[union-attr]
    return None if whole is None else whole[node.args[1]]


# -- a graph at other sizes -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A graph whose storages and shapes are functions of symbols."""

    graph: Graph  # as captured
    nbytes: Mapping[int, Formula]  # of storages that depend on symbols
    shapes: Mapping[int, tuple[Formula, ...]]  # of values that do
    symbols: tuple[str, ...]

    @staticmethod
    def of(graph: Graph, value_nodes: tuple[fx.Node, ...]) -> Scaled:
        """How the storages and values of `graph` depend on symbols, from what the nodes were captured with."""
        nbytes, shapes = dict[int, Formula](), dict[int, tuple[Formula, ...]]()
        for value, node in zip(graph.values, value_nodes, strict=True):
            symbolic = _symbolic(node)
            if not isinstance(symbolic, Tensor):
                continue
            if any(map(seams.is_symbol, symbolic.shape)):
                shapes[value.id] = tuple(Formula.of(size) for size in symbolic.shape)
            size = memory_of(symbolic).nbytes()
            if value.base is None and seams.is_symbol(size):
                nbytes[value.storage] = Formula.of(size)
        found = {s for f in nbytes.values() for s in f.symbols}
        found |= {s for shape in shapes.values() for f in shape for s in f.symbols}
        return Scaled(graph=graph, nbytes=nbytes, shapes=shapes, symbols=tuple(sorted(found)))

    def at(self, numbers: Mapping[str, int]) -> Graph:
        """The graph with its symbols at `numbers`; times and workspaces grow with the tensors of each op."""

        def value_of(formula: Formula) -> int:
            return formula(*(numbers[s] for s in formula.symbols))

        def sized(storage: Storage) -> Storage:
            formula = self.nbytes.get(storage.id)
            return storage if formula is None else replace(storage, nbytes=value_of(formula))

        storages = tuple(map(sized, self.graph.storages))
        values = tuple(
            replace(v, shape=tuple(map(value_of, self.shapes[v.id]))) if v.id in self.shapes else v
            for v in self.graph.values
        )
        if storages == self.graph.storages:
            return self.graph
        grown = with_times_of(replace(self.graph, storages=storages, values=values), self.graph)
        return replace(grown, timing=self.graph.timing)
