"""The form in which a step of a schedule runs an op: one answer for whoever runs it, to measure it or for good."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir import Op, Rerun
from planner.schedule import Run, RunKind
from profiler.collectives import held_until, is_wait, makes_new
from profiler.ops import inplace_call, storage_root, without_side_effect
from profiler.tracing.ranks.torch_distributed import settled_wait


class Generator(Enum):
    """What a run does with the device's generator."""

    AS_IT_IS = "as it is"
    SAVED = "its state from before the run is saved"
    REPLAYED = "the saved state is drawn from again, and the generator put back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Target and arguments, in captured nodes, of one run of an op."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Generator
    device: torch.device


def form_of(run: Run, op: Op, node: fx.Node) -> Form:
    """How `run` runs the op that `node` captured: in place, without side effect, with a replayed draw, or plainly."""
    target, args, kwargs = _call(run, op, node)
    return Form(target=target, args=args, kwargs=kwargs, generator=_generator(run, op), device=_device(node))


def _call(run: Run, op: Op, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if run.into is not None:
        return inplace_call(node)
    if is_wait(node):
        sent = [one for one in held_until(node) if storage_root(one).op == "call_function"]
        return settled_wait, (node.args[0], *sent), {"is_new": makes_new(node)}
    if run.kind is RunKind.RERUN and op.rerun is Rerun.WITHOUT_SIDE_EFFECT:
        form = without_side_effect(node)
        assert form is not None, f"{node.name} has no form without side effect"
        return form
    return node.target, node.args, node.kwargs


def _generator(run: Run, op: Op) -> Generator:
    if op.rerun is not Rerun.REPLAY_RNG or run.kind is RunKind.ORIGINAL:
        return Generator.AS_IT_IS
    return Generator.REPLAYED if run.kind is RunKind.RERUN else Generator.SAVED


def _device(node: fx.Node) -> torch.device:
    value = node.meta.get("val")
    tensors = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
