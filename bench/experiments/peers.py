"""What users would pick instead, on the same model, batch, seed and meter: each in a process of its own.

A peer that fails is a row that says why.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
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

from bench.machine.clock import clock_for, spread
from bench.machine.fresh_process import FreshProcessError, give_row, row_of
from bench.show.terminal import print_table, stage
from bench.workloads.spec import WorkloadSpec
from planner.errors import PlannerError
from profiler.measuring.restoring import Touched
from profiler.workload import Workload
from rewriter.proof import Observation, compare, observe

# The repeated blocks of the zoo's models, by class name.
BLOCKS = frozenset(
    {"BasicBlock", "Bottleneck", "InvertedResidual", "EncoderBlock", "_DenseLayer", "BertLayer", "GPT2Block"}
)
SAVED_OPS = ("convolution", "mm", "addmm", "bmm", "_scaled_dot_product")
PROVEN_STEPS = 2
PARTITIONER_BUDGETS = (0.8, 0.5, 0.3, 0.1)

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


def hugging_face(model: nn.Module) -> nn.Module:
    """Hugging Face's own gradient checkpointing."""
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise NotForThisModelError(f"{type(model).__name__} is not a transformers model")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    return model


def partitioner(model: nn.Module, *, budget: float) -> nn.Module:
    """PyTorch's min-cut partitioner with its memory budget."""
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = budget
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


PEERS: dict[str, Peer] = {
    "torch.utils.checkpoint, every block": per_block,
    "torch.utils.checkpoint, every second block": partial(per_block, every=2),
    "selective checkpointing, products saved": selective,
    "checkpoint_sequential, 2 segments a stage": sequential,
    "Hugging Face gradient checkpointing": hugging_face,
    **{f"PyTorch partitioner, budget {b}": partial(partitioner, budget=b) for b in PARTITIONER_BUDGETS},
}


def peer_rows(spec: WorkloadSpec, names: Sequence[str], *, pairs: int) -> Iterator[dict[str, Any]]:
    """Each peer on one model, as soon as it is measured."""
    for name in names:
        with stage(f"{spec.title}: {name}"):
            row = _row_or_why_not(spec, name, pairs)
        yield row


def _row_or_why_not(spec: WorkloadSpec, name: str, pairs: int) -> dict[str, Any]:
    try:
        return row_of("bench.experiments.peers", spec, name, pairs)
    except FreshProcessError as error:
        return {"model": spec.title, "peer": name, "error": error.reason}


def print_peers(spec: WorkloadSpec, rows: Sequence[dict[str, Any]], *, pairs: int) -> None:
    """The rows of peers as a table."""
    caption = (
        "Ratios to eager in the same process: peak of what the step adds to memory, and time (median and quartiles of "
        f"{pairs} rounds in turn). 'exact': after {PROVEN_STEPS} steps, compared bit by bit."
    )
    print_table(f"{spec.title}: what else there is", COLUMNS, [peer_cells(row) for row in rows], caption=caption)


def measure_peer(spec: WorkloadSpec, name: str, pairs: int) -> dict[str, Any]:
    """One peer against eager, in this process; two models of the same seed."""
    plain, changed = spec.make(), spec.make()
    called = PEERS[name](changed[1])
    expected = _observe(plain, plain[1])
    actual = _observe(changed, called)
    proof = compare(expected, actual, predicted_peak_bytes=actual.peak_bytes)
    ratios = spread(_ratios(plain, changed, called, pairs))
    assert ratios is not None
    return {
        "model": spec.title,
        "peer": name,
        "error": "",
        "peak_ratio": actual.peak_bytes / expected.peak_bytes,
        "time_ratio": ratios.median,
        "time_low": ratios.low,
        "time_high": ratios.high,
        "exact": proof.exact,
        "first_mismatch": proof.first_mismatch,
        "largest_difference": proof.largest_difference,
    }


def _observe(workload: Workload, called: nn.Module) -> Observation:
    step, model, optimizer, batch = workload
    torch.manual_seed(0)
    touched = Touched(model=model, optimizer=optimizer, unread_gradients=list(model.parameters()))
    return observe(lambda b: step(called, optimizer, b), touched, batch, steps=PROVEN_STEPS)


def _ratios(plain: Workload, changed: Workload, called: nn.Module, pairs: int) -> list[float]:
    clock, ratios = clock_for(plain[1]), []
    for _ in range(pairs):
        eager_s = clock.seconds(lambda: plain[0](plain[1], plain[2], plain[3]))
        ratios.append(clock.seconds(lambda: changed[0](called, changed[2], changed[3])) / eager_s)
    return ratios


COLUMNS = ("what", "peak", "time", "quartiles", "exact", "first difference")


def peer_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    if row["error"]:
        return (row["peer"], "-", "-", "-", "-", row["error"])
    spread = f"{row['time_low']:.2f}-{row['time_high']:.2f}"
    verdict = "yes" if row["exact"] else "NO"
    return (
        row["peer"],
        f"{row['peak_ratio']:.2f}",
        f"{row['time_ratio']:.2f}x",
        spread,
        verdict,
        row["first_mismatch"],
    )


if __name__ == "__main__":
    give_row(lambda: measure_peer(WorkloadSpec(**json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
