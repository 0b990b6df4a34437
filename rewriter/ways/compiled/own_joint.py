"""Forward and backward of one of Dynamo's graphs, traced over the real autograd engine: eager's own arithmetic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir import Role
from profiler.errors import CaptureError, explain
from profiler.measuring.sampling import sampled
from profiler.ops import NUMBER
from profiler.tracing.fake_tensors.patches import autocast_cache
from profiler.tracing.fx_graphs.cleaning import clean
from profiler.tracing.fx_graphs.layouts import Layout
from profiler.tracing.fx_graphs.provenance import Stamper
from profiler.tracing.fx_graphs.typed_graph import Port, lift
from profiler.tracing.gradient_sums import mark_sums, parts_noted
from profiler.tracing.joint import kept_for_another_backward, outside
from rewriter.ways.compiled import seams
from rewriter.ways.compiled.partitioning import JointGraph
from rewriter.ways.compiled.symbols import Formula, Scaled, at_hints, make_sizes_live


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Where a graph's inputs, outputs, tangents and gradients are among the values of its typed graph.

    Outputs are counted among the distinct tensors that it returns, tangents come for `used` of them.
    """

    inputs: tuple[int | None, ...]  # per placeholder; None for a number
    outputs: tuple[int, ...]
    trainable: tuple[int, ...]
    used: tuple[int, ...]
    tangents: tuple[int | None, ...]  # per used output; None where nothing reads it
    gradients: tuple[int, ...]
    receivers: tuple[int, ...]  # per gradient: the input that it is for
    layouts: tuple[Layout, ...]  # per used output: how its tangent lies in memory


@dataclass(frozen=True, kw_only=True)
class OwnJoint:
    """A captured forward and backward of a graph."""

    joint: JointGraph
    ends: Ends
    device: torch.device
    returned: tuple[Any, ...]  # per output of the graph: ("tensor", i) or ("number", formula) or ("as it is", value)
    symbols: tuple[tuple[str, int], ...]  # name -> the placeholder that holds it

    @cached_property
    def measured(self) -> Scaled:
        """The graph with times and workspaces, at any sizes; measured when it is first asked for."""
        graph = sampled(self.joint.graph, self.joint.nodes, device=self.device)
        return Scaled.of(graph, self.joint.value_nodes)

    def numbers(self, args: Sequence[Any]) -> dict[str, int]:
        """The symbols' values in a call."""
        return {name: args[i] for name, i in self.symbols}

    def filled(self, tensors: Sequence[Tensor], args: Sequence[Any]) -> tuple[Any, ...]:
        """What the graph returns, with these tensors in it."""
        numbers = self.numbers(args)

        def entry(kind: str, what: Any) -> Any:
            if kind == "tensor":
                return tensors[what]
            return what(*(numbers[s] for s in what.symbols)) if kind == "number" else what

        return tuple(entry(*one) for one in self.returned)


def captured(
    module: fx.GraphModule,
    stand_ins: Sequence[Any],
    *,
    name: str,
    used: Collection[int] | None = None,
    layouts: Mapping[int, Layout] | None = None,
) -> OwnJoint:
    """The joint graph of `module`; `used` are the outputs that get gradients (None: all), CaptureError where it fails.

    `layouts` are those of gradients that do not lie in memory like the outputs that they are for.
    """
    tracing = _Tracing(module, used, layouts or {})
    try:
        traced = seams.traced_on(tracing.run, stand_ins)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(f"{name} of Dynamo's cannot be traced through autograd: {explain(error)}") from error
    dynamic = any(map(seams.is_symbol, stand_ins))
    if dynamic:
        at_hints(traced)
    clean(traced)
    if dynamic:
        make_sizes_live(traced)
    for node in traced.graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymFloat) and NUMBER not in node.meta:
            raise CaptureError(
                f"{name} of Dynamo's computes with a number that is known only when it runs: {node.name}"
            )
    return _lifted(traced, tracing, stand_ins, name)


class _PlacedStamper(Stamper):
    """Takes the places of nodes from the graph that is run."""

    place = ("", "")

    def _walk(self, frame: FrameType | None) -> tuple[str, str]:
        return self.place


class _Tracing:
    """One run of a graph's forward, `outside`, and its backward, while ops are recorded."""

    def __init__(
        self,
        module: fx.GraphModule,
        used: Collection[int] | None,
        layouts: Mapping[int, Layout],
    ) -> None:
        self.module = module
        self.layouts = layouts
        self.wanted_use = used
        self.stamper = _PlacedStamper(module)
        self.returned: list[Any] = []
        self.trainable: tuple[int, ...] = ()
        self.used: tuple[int, ...] = ()
        self.receivers: list[int] = []
        self.output_count = 0

    def run(self, *inputs: Any) -> list[Tensor]:
        with ExitStack() as stack:
            stack.enter_context(self.stamper.attached(seams.current_tracer()))
            stack.enter_context(autocast_cache())
            stack.enter_context(torch.enable_grad())
            # Only these: what needs no gradient knows more of itself (the number that it holds) than a copy would.
            wants = [isinstance(i, Tensor) and i.requires_grad for i in inputs]
            leaves = [i.detach().requires_grad_() if want else i for i, want in zip(inputs, wants, strict=True)]
            tensors = self._sorted(_Forward(self.module, self.stamper).run(*leaves))
            self.used = tuple(i for i in self.trainable if self.wanted_use is None or i in self.wanted_use)
            if not self.used:
                raise CaptureError("the graph returns no tensor that a loss could be differentiated through")
            outputs = [tensor.detach() for tensor in tensors]
            others = [output for i, output in enumerate(outputs) if i not in self.used]
            strides = [n for i in self.used for n in self._strides(i, outputs[i])]
            tangents = outside([outputs[i] for i in self.used], others, strides)
            differentiated = [tensors[i] for i in self.used]
            wanted = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            asked = [leaves[i] for i in wanted]
            with self.stamper.backward(), parts_noted(differentiated, asked) as parts:
                gradients = torch.autograd.grad(differentiated, asked, tangents, allow_unused=True)
            mark_sums(parts, gradients)
        found = [(i, gradient) for i, gradient in zip(wanted, gradients, strict=True) if gradient is not None]
        self.receivers = [i for i, _ in found]
        return [*outputs, *(gradient for _, gradient in found)]

    def _strides(self, i: int, output: Tensor) -> Sequence[int]:
        layout = self.layouts.get(i)
        return output.stride() if layout is None else layout.strides(tuple(output.shape))

    def _sorted(self, returned: Any) -> list[Tensor]:
        """The distinct tensors that the graph returns."""
        tensors: dict[int, Tensor] = {}
        for one in returned if isinstance(returned, (tuple, list)) else (returned,):
            if isinstance(one, Tensor):
                tensors.setdefault(id(one), one)
                self.returned.append(("tensor", list(tensors).index(id(one))))
            elif seams.is_symbol(one):
                self.returned.append(("number", Formula.of(one)))
            else:
                self.returned.append(("as it is", one))
        found = list(tensors.values())
        self.output_count = len(found)
        self.trainable = tuple(i for i, tensor in enumerate(found) if tensor.requires_grad)
        return found


class _Forward(fx.Interpreter):
    """Runs a graph of Dynamo's, and tells the stamper where its nodes come from."""

    def __init__(self, module: fx.GraphModule, stamper: _PlacedStamper) -> None:
        super().__init__(module)
        self.stamper = stamper

    def run_node(self, n: fx.Node) -> Any:
        self.stamper.place = (seams.module_path(n), str(n.meta.get("source_line", "")))
        return super().run_node(n)


def _lifted(traced: fx.GraphModule, tracing: _Tracing, stand_ins: Sequence[Any], name: str) -> OwnJoint:
    inputs = traced.graph.find_nodes(op="placeholder")
    ports = [Port(name=node.name, role=Role.INPUT if isinstance(node.meta["val"], Tensor) else None) for node in inputs]
    (output,) = traced.graph.find_nodes(op="output")
    roles = [Role.OUTPUT] * tracing.output_count
    roles += [Role.GRADIENT] * (len(output.args[0]) - tracing.output_count)
    lifted = lift(traced, ports, roles, name=name)
    position = {node: v for v, node in enumerate(lifted.value_nodes)}
    graph = kept_for_another_backward(lifted.graph)
    flat = output.args[0]
    count = tracing.output_count
    (turn,) = [op for op in graph.ops if op.target == "recompute_planner.outside.default"]
    made = {graph.values[v].name: v for v in turn.outputs}
    tangent_nodes = {n.args[1]: made[n.name] for n in lifted.nodes[turn.id].users if n.name in made}
    ends = Ends(
        inputs=tuple(position.get(node) for node in inputs),
        outputs=tuple(position[node] for node in flat[:count]),
        trainable=tracing.trainable,
        used=tracing.used,
        tangents=tuple(tangent_nodes.get(i) for i in range(len(tracing.used))),
        gradients=tuple(position[node] for node in flat[count:]),
        receivers=tuple(tracing.receivers),
        layouts=tuple(tracing.layouts.get(i) or Layout.of(flat[i].meta["val"]) for i in tracing.used),
    )
    joint = JointGraph(graph=graph, module=traced, nodes=lifted.nodes, value_nodes=lifted.value_nodes)
    symbols = tuple((str(s), i) for i, s in enumerate(stand_ins) if seams.is_symbol(s))
    return OwnJoint(
        joint=joint,
        ends=ends,
        device=next((s.device for s in stand_ins if isinstance(s, Tensor)), torch.device("cpu")),
        returned=tuple(tracing.returned),
        symbols=symbols,
    )
