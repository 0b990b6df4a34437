"""Library code that asks whether it is traced gets eager's answer, so that it goes eager's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch._subclasses
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.errors import CaptureError
from profiler.tracing.eager_ways.live_numbers import outcomes_in_math
from profiler.tracing.fake_tensors.patches import Patch, patched


class _NoTensor:
    """The class of no tensor at all."""


def _no() -> bool:
    return False


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, no tensor looks fake to a library, and nothing is compiled, exported or traced."""
    with ExitStack() as stack:
        stack.enter_context(answers_of_eager())
        stack.enter_context(outcomes_in_math())
        stack.enter_context(scripts_as_written())
        yield


@contextmanager
def scripts_as_written() -> Iterator[None]:
    """Inside, functions in TorchScript run op by op as they are written; CaptureError where they are differentiated.

    TorchScript watches its first runs and rewrites itself after them, gradients and all, which then round otherwise.
    """
    kinds = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    with patched([(kind, "__call__", _as_written(kind.__call__)) for kind in kinds]):
        yield


def _as_written(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_rewritten = torch._C._get_graph_executor_optimize()
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            made = call(self, *args, **kwargs)
        leaves = pytree.tree_leaves(made)
        if is_rewritten and any(isinstance(one, Tensor) and one.requires_grad for one in leaves):
            raise CaptureError(
                f"{self.name} is in TorchScript and differentiated: TorchScript rewrites it after its first runs, and "
                "its gradients then round otherwise than before. Define it without torch.jit.script, or call it, in "
                "eager too, inside `with torch.jit.optimized_execution(False)`"
            )
        return made

    return run


@contextmanager
def answers_of_eager() -> Iterator[None]:
    """Inside, who asks whether he is compiled, exported or traced, or sees a fake tensor, is told no.

    Torch's own code knows its fake tensors by another name, `torch._subclasses.fake_tensor.FakeTensor`.
    """
    asked: list[Patch] = [
        (torch.compiler, name, _no) for name in ("is_compiling", "is_dynamo_compiling", "is_exporting")
    ]
    asked += [(torch.jit, "is_tracing", _no), (torch._subclasses, "FakeTensor", _NoTensor)]
    with patched(asked):
        yield
