"""What training leaves behind, step by step, as digests: two runs from the same seed are equal to the bit, or not."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.workload import Workload

History = Sequence[Sequence[tuple[str, bytes]]]  # step by step: what it leaves behind, each thing by name and digest


def history_of(call: Callable[[], Any], workload: Workload, *, steps: int) -> History:
    """What each of `steps` calls leaves in `workload`, from fixed seeds."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # some libraries draw their masks there
    return [_left_behind(call(), workload) for _ in range(steps)]


def _left_behind(returned: Any, workload: Workload) -> list[tuple[str, bytes]]:
    """Digests of all that a step leaves: what it returned, parameters, gradients, buffers, state, the generator."""
    found = [("returned value", leaf) for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
    for name, param in workload.model.named_parameters():
        found.append((f"parameter {name}", param))
        if param.grad is not None:
            found.append((f"gradient {name}", param.grad))
        state = workload.optimizer.state.get(param, {}) if workload.optimizer is not None else {}
        found += [(f"{key} of {name}", value) for key, value in state.items() if isinstance(value, Tensor)]
    found += [(f"buffer {name}", buffer) for name, buffer in workload.model.named_buffers()]
    found.append(("the generator", torch.get_rng_state()))
    return [(name, digest(tensor)) for name, tensor in found]


def first_difference(expected: History, actual: History) -> str:
    """The first tensor that differs in any bit, and at which step; "" where none does."""
    for step, (one, other) in enumerate(zip(expected, actual, strict=True), 1):
        if [name for name, _ in one] != [name for name, _ in other]:
            return f"step {step} leaves other tensors behind"
        for (name, a), (_, b) in zip(one, other, strict=True):
            if a != b:
                return f"{name} differs after step {step}"
    return ""


def digest(tensor: Tensor) -> bytes:
    """What is the same for tensors of the same shape, type and bits only."""
    bits = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + bits.tobytes()).digest()
