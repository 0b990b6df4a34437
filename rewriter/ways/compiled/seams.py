"""All that is used of torch and is not promised to stay: written for torch 2.13, and looked for nowhere else.

Who finds this file broken by another version of torch has to look at nothing beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._inductor.custom_graph_pass import CustomPartitionerFn

__all__ = [
    "BackendCompilerFailed", "TorchDynamoException", "compiled_before", "compiled_by_inductor", "current_tracer",
    "fake_tensors", "formula_of", "hint_of", "is_for_backward", "is_symbol", "module_path", "names_in_formulas",
    "outside_of_tracing", "recompile_limit", "stand_ins", "tangents_of", "traced_on", "with_hooks_minded",
]  # fmt: skip

WRITTEN_FOR = "2.13"

Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


# -- sizes that are symbols -------------------------------------------------------------------------------------


def is_symbol(value: object) -> bool:
    """Whether a number is one that is known only when the graph runs."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def hint_of(value: Any) -> Any:
    """The number that a symbol had when the graph was captured; any other value as it is."""
    if not isinstance(value, torch.SymInt):
        return value.node.hint if is_symbol(value) else value
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return optimization_hint(value)


def formula_of(value: torch.SymInt) -> tuple[str, tuple[str, ...]]:
    """A symbolic size as Python source, and the symbols that it is made of."""
    from torch.utils._sympy.printers import PythonPrinter

    expression = value.node.expr
    return PythonPrinter().doprint(expression), tuple(sorted(str(s) for s in expression.free_symbols))


def names_in_formulas() -> dict[str, Any]:
    """What the source of a formula may refer to."""
    import math

    return {"math": math, "torch": torch, "max": max, "min": min}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have no memory, and what is around counts for nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield


@contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Ops inside run for real, although a compiler is at work around."""
    from torch._guards import tracing
    from torch.utils._python_dispatch import _disable_current_modes

    with tracing(None), _disable_current_modes():
        yield


# -- a graph of Dynamo's, traced through autograd ---------------------------------------------------------------


def stand_ins(module: fx.GraphModule) -> list[Any]:
    """What Dynamo traced a graph of its own with, by placeholder: tensors without memory, and symbols."""
    return [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]


def returned(module: fx.GraphModule) -> list[Any]:
    """What a graph of Dynamo's returned when it was traced."""
    (output,) = module.graph.find_nodes(op="output")
    return [node.meta["example_value"] for node in output.all_input_nodes]


def traced_on(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """The ops of `function(*inputs)`; the inputs are Dynamo's own stand-ins, symbols among them."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = next((i.fake_mode for i in inputs if isinstance(i, FakeTensor)), None)
    # While it compiles, Dynamo has another mode at hand than that of its stand-ins.
    with tracing(None), enable_python_dispatcher(), mode or nullcontext():
        return make_fx(
            function, tracing_mode="real", _allow_non_fake_inputs=True, _disable_torch_fn_metadata_mode=True
        )(*inputs)


def current_tracer() -> Any:
    """The tracer that records ops now."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer


def module_path(node: fx.Node) -> str:
    """Where in the model Dynamo found what a node of its graph does."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").replace("_modules['", "").replace("']", "")


# -- inductor ---------------------------------------------------------------------------------------------------


def compiled_by_inductor(
    module: fx.GraphModule, inputs: Sequence[Any], *, partition: Partition, without_plan: Callable[[], None]
) -> Callable[..., Any]:
    """Inductor's code for a graph, forward and backward as `partition(joint, num_fwd_outputs)` says.

    `without_plan` is called where the graph has no backward that could be planned.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    partitioner = _Partitioner(partition, without_plan)
    patches = {"custom_partitioner_fn": partitioner, "fx_graph_cache": False}
    with functorch_config.patch(enable_autograd_cache=False):  # it would leave the partitioner out
        compiled: Any = compile_fx(module, inputs, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


class _Partitioner(CustomPartitionerFn):
    """Inductor's way to ask what the forward is to save."""

    def __init__(self, partition: Partition, without_plan: Callable[[], None]) -> None:
        self.partition = partition
        self.without_plan = without_plan

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        num_fwd_outputs: int = kwargs["num_fwd_outputs"]
        if tangents_of(gm):
            return self.partition(gm, num_fwd_outputs)
        from torch._functorch.partitioners import default_partition

        self.without_plan()
        static = kwargs.get("static_lifetime_input_indices")
        return default_partition(
            gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
        )

    def uuid(self) -> None:
        """None: plans depend on measured times and on the budget, and are never to come from inductor's cache."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # inductor pickles its settings, if only to find that it cannot use its cache


def tangents_of(joint: fx.GraphModule) -> list[fx.Node]:
    """The inputs of AOTAutograd's joint graph that come back from the caller."""
    from torch._functorch._aot_autograd.utils import _is_tangent

    return [node for node in joint.graph.find_nodes(op="placeholder") if _is_tangent(node)]


def is_for_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd put a node that needs no tangent into the backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


# -- Dynamo -----------------------------------------------------------------------------------------------------


def recompile_limit() -> int:
    """How often Dynamo compiles one piece of code before it gives up on it."""
    import torch._dynamo.config

    return int(torch._dynamo.config.recompile_limit)


@contextmanager
def with_hooks_minded() -> Iterator[None]:
    """What is compiled inside is compiled anew where a module gets a hook, which Dynamo by itself would not notice."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        yield


def compiled_before() -> int:
    """How often the piece of code that is being compiled was compiled before."""
    from torch._guards import CompileContext

    now = CompileContext.current_compile_id()
    return 0 if now is None or now.frame_compile_id is None else int(now.frame_compile_id)
