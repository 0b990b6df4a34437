"""Eager and captured, side by side: equal to the bit after every step, or the name of what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.tracing.whole_step import TracedStep, capture

Make = Callable[[], tuple[Any, ...]]


def assert_captured_equals_eager(
    make: Make,
    *,
    steps: int = 3,
    between: Callable[[int, Any, Any], None] | None = None,
    recaptures: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> TracedStep:
    """Make the same step twice, run one eagerly and one captured, and compare everything after each step.

    `between(step, model, optimizer)` runs after each step on both, as a training loop would. `recaptures` is
    how often the step must be captured anew because it is no longer the captured one. Every step runs, and is
    captured, inside `around()`; `options` are those of `capture`.
    """
    step, model, optimizer, batch = _seeded(make)
    batches = _batches(batch, steps)
    eager = []
    torch.manual_seed(1)
    for i, one in enumerate(batches):
        with around():
            result = step(model, optimizer, one)
        eager.append(_snapshot(result, model, optimizer))
        if between is not None:
            between(i, model, optimizer)

    step, model, optimizer, batch = _seeded(make)
    with around():
        traced = capture(step, model, optimizer, batch, **options)
    torch.manual_seed(1)
    for i, one in enumerate(batches):
        with around():
            if traced.convention.check(one):
                traced, recaptures = capture(step, model, optimizer, one, **options), recaptures - 1
            result = traced.run(one)
        _assert_same(eager[i], _snapshot(result, model, optimizer), f"after step {i}")
        if between is not None:
            between(i, model, optimizer)
    assert recaptures == 0
    traced.graph.validate()
    return traced


def _seeded(make: Make) -> Any:
    torch.manual_seed(0)
    return make()


def _batches(batch: Any, steps: int) -> list[Any]:
    """Other values at each step, in the same shapes."""
    generator = torch.Generator().manual_seed(7)

    def vary(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape).clone()

    return [pytree.tree_map_only(Tensor, vary, batch) for _ in range(steps)]


def _snapshot(result: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    leaves, tree = pytree.tree_flatten(result)
    record: dict[str, Any] = {"result tree": str(tree), "rng": torch.get_rng_state()}
    record |= {f"result {i}": leaf for i, leaf in enumerate(leaves)}
    record |= {f"param {n}": p for n, p in model.named_parameters()}
    record |= {f"grad {n}": p.grad for n, p in model.named_parameters()}
    record |= {f"buffer {n}": b for n, b in model.named_buffers()}
    record |= {f"training {n}": m.training for n, m in model.named_modules()}
    leaves = pytree.tree_flatten_with_path(optimizer.state_dict())[0]
    record |= {f"optimizer {pytree.keystr(path)}": leaf for path, leaf in leaves}
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in record.items()}


def _assert_same(expected: dict[str, Any], got: dict[str, Any], where: str) -> None:
    assert list(expected) == list(got), where
    wrong = [name for name, value in expected.items() if not same_bits(value, got[name])]
    assert not wrong, f"{where}: {len(wrong)} of {len(expected)} differ, first {wrong[:5]}"


def same_bits(a: Any, b: Any) -> bool:
    """Equal to the last bit: -0.0 is not 0.0, and NaN is NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.layout == b.layout == torch.sparse_coo:
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def op_named(traced: TracedStep, fragment: str) -> Any:
    """The first op whose target contains `fragment`."""
    return next(op for op in traced.graph.ops if fragment in op.target)


def targets(traced: TracedStep) -> Sequence[str]:
    """What the ops call, in order."""
    return [op.target for op in traced.graph.ops]
