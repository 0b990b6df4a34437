"""What is compared with planned steps: what users would pick instead, and our own other door, the planned model.

Each changes a model in place, and gives what the step is to call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from planner.errors import PlannerError
from rewriter import checkpoint_model
from rewriter.model import WAYS
from rewriter.ways.common import Kernels

# The repeated blocks of the zoo's models, by class name.
BLOCKS = frozenset(
    {"BasicBlock", "Bottleneck", "InvertedResidual", "EncoderBlock", "_DenseLayer", "CNBlock", "BertLayer", "GPT2Block"}
)
SAVED_OPS = ("convolution", "mm", "addmm", "bmm", "_scaled_dot_product")
PARTITIONER_BUDGETS = (0.8, 0.5, 0.3, 0.1)
INDUCTOR_BUDGETS = (0.7, 0.5, 0.3)

# Changes a model in place, and gives what the step is to call instead of it.
Peer = Callable[[nn.Module], nn.Module]


class NotForThisModelError(PlannerError):
    """A peer that does not apply to a model; the row says why."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model; NotForThisModelError if it has none that we know."""
    found = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    if not found:
        raise NotForThisModelError(f"{type(model).__name__} has no block of a known kind")
    return found


def per_block(model: nn.Module, *, every: int = 1, context: Callable[[], Any] | None = None) -> nn.Module:
    """torch.utils.checkpoint around every block, or every second."""
    options: dict[str, Any] = {"use_reentrant": False}
    if context is not None:
        options["context_fn"] = context
    for block in blocks(model)[::every]:
        block.forward = partial(checkpoint, block.forward, **options)
    return model


def selective(model: nn.Module) -> nn.Module:
    """Selective checkpointing: what convolutions, matrix products and attention make is saved."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = getattr(getattr(op, "overloadpacket", op), "__name__", "")
        return CheckpointPolicy.MUST_SAVE if name.startswith(SAVED_OPS) else CheckpointPolicy.PREFER_RECOMPUTE

    return per_block(model, context=lambda: create_selective_checkpoint_contexts(policy))  # type: ignore[no-untyped-call]


def sequential(model: nn.Module, *, segments: int = 2) -> nn.Module:
    """checkpoint_sequential over every sequence of blocks."""
    known = {id(block) for block in blocks(model)}
    sequences = [m for m in model.modules() if isinstance(m, nn.Sequential) and any(id(c) in known for c in m)]
    if not sequences:
        raise NotForThisModelError(f"{type(model).__name__} has no nn.Sequential of blocks")
    for sequence in sequences:
        children = list(sequence)
        sequence.forward = partial(  # type: ignore[method-assign]
            checkpoint_sequential, children, min(segments, len(children)), use_reentrant=False
        )
    return model


def hugging_face(model: nn.Module, **options: Any) -> nn.Module:
    """Hugging Face's own gradient checkpointing; `options` are those of later versions."""
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise NotForThisModelError(f"{type(model).__name__} is not a transformers model")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False}, **options)
    return model


def partitioner(model: nn.Module, *, budget: float) -> nn.Module:
    """PyTorch's min-cut partitioner with its memory budget."""
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = budget
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


def inductor(model: nn.Module, *, budget: float | None = None) -> nn.Module:
    """torch.compile as it comes, or with a memory budget for what its backward is given."""
    import torch._functorch.config as functorch_config

    if budget is not None:
        functorch_config.activation_memory_budget = budget
    compiled: Any = torch.compile(model)
    return compiled  # type: ignore[no-any-return]


def planned_model(model: nn.Module, *, budget: str, kernels: Kernels) -> nn.Module:
    """Our own other door: the model planned, the loop around it left alone."""
    return checkpoint_model(model, budget=budget, kernels=kernels.value)


PEERS: dict[str, Peer] = {
    "torch.utils.checkpoint, every block": per_block,
    "torch.utils.checkpoint, every second block": partial(per_block, every=2),
    "selective checkpointing, products saved": selective,
    "checkpoint_sequential, 2 segments a stage": sequential,
    "Hugging Face gradient checkpointing": hugging_face,
    "Hugging Face gradient checkpointing, every second layer": partial(hugging_face, every_n_layers=2),
    "Hugging Face gradient checkpointing, offload": partial(hugging_face, offload=True),
    **{f"PyTorch partitioner, budget {b}": partial(partitioner, budget=b) for b in PARTITIONER_BUDGETS},
    "inductor": inductor,
    **{f"inductor, memory budget {b}": partial(inductor, budget=b) for b in INDUCTOR_BUDGETS},
}

# Our own, which take the budgets that steps are planned for; those that a door has a way for.
PLANNED_MODELS = {
    name: kernels
    for name, kernels in (("planned model", Kernels.EAGER), ("planned model + inductor", Kernels.INDUCTOR))
    if kernels in WAYS
}
_BUDGET = ", budget "


def peer_names(budgets: Sequence[str]) -> list[str]:
    """All there are: the model planned for each budget, then what users would pick instead."""
    return [f"{name}{_BUDGET}{budget}" for name in PLANNED_MODELS for budget in budgets] + list(PEERS)


def is_ours(name: str) -> bool:
    """Whether that is a planned model."""
    return name.partition(_BUDGET)[0] in PLANNED_MODELS


def peer_named(name: str) -> Peer:
    """The peer of one of `peer_names`."""
    kind, _, budget = name.partition(_BUDGET)
    return partial(planned_model, budget=budget, kernels=PLANNED_MODELS[kind]) if is_ours(name) else PEERS[name]
