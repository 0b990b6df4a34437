"""Library code that asks whether it is traced gets eager's answer, so that it goes eager's way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch._subclasses

from profiler.tracing.live_numbers import outcomes_in_math
from profiler.tracing.patches import Patch, patched


class _NoTensor:
    """The class of no tensor at all."""


def _no() -> bool:
    return False


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Inside, no tensor looks fake to a library, and nothing is compiled, exported or traced.

    Torch's own code knows its fake tensors by another name, `torch._subclasses.fake_tensor.FakeTensor`.
    """
    asked: list[Patch] = [
        (torch.compiler, name, _no) for name in ("is_compiling", "is_dynamo_compiling", "is_exporting")
    ]
    asked += [(torch.jit, "is_tracing", _no), (torch._subclasses, "FakeTensor", _NoTensor)]
    with ExitStack() as stack:
        stack.enter_context(patched(asked))
        stack.enter_context(outcomes_in_math())
        yield
