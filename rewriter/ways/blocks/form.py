"""One plan of a model by blocks: which of them are recomputed, for which calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from planner.solve import Solution
from profiler.tracing.fake_tensors.patches import patched
from profiler.tracing.joint import forward_of
from rewriter.proof import Verification
from rewriter.ways.blocks.profile import Block
from rewriter.ways.blocks.recomputation import Buffer, Recomputation
from rewriter.ways.rehearsal import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a call looks like, apart from sizes: a step of one kind says nothing of another's memory."""

    call: Call
    training: tuple[bool, ...]  # per module
    trained: tuple[bool, ...]  # per parameter

    @staticmethod
    def of(model: nn.Module, batch: Any) -> Kind:
        """The kind of a call; `batch` is `(args, kwargs)`."""
        return Kind(
            call=Call.of(model, batch),
            training=tuple(module.training for module in model.modules()),
            trained=tuple(p.requires_grad for p in model.parameters()),
        )


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """One plan: which blocks are recomputed, for batches up to a size."""

    kind: Kind
    sizes: tuple[int, ...]
    solution: Solution
    recomputed: tuple[Block, ...]
    calls_seen: Mapping[str, int]  # per module
    written: set[Buffer]  # grows where forwards turn out to write to more
    verification: Verification | None = None

    def serves(self, kind: Kind, sizes: tuple[int, ...]) -> bool:
        """Whether a call is of this kind, and no larger."""
        if self.kind != kind or len(self.sizes) != len(sizes):
            return False
        return all(size <= most for size, most in zip(sizes, self.sizes, strict=True))

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward with these blocks recomputed in its backward; the model is as it was afterwards."""
        with self._in_place(model):
            return forward_of(model, args, kwargs)

    def _in_place(self, model: nn.Module) -> AbstractContextManager[None]:
        modules = dict(model.named_modules())
        alone = {block.calls[0].path for block in self.recomputed if len(block.calls) == 1}
        runs = [block for block in self.recomputed if len(block.calls) > 1]
        sequences = {block.calls[0].path.rpartition(".")[0] for block in runs}
        patches = [(modules[p], "forward", self._single(modules[p], p)) for p in sorted(alone)]
        patches += [(modules[p], "forward", self._sequence(modules[p], p, runs)) for p in sorted(sequences)]
        return patched(patches)

    def _single(self, module: nn.Module, path: str) -> Callable[..., Any]:
        """A module's forward: calls that the plan recomputes go through `torch.utils.checkpoint`."""
        forward = module.forward
        again = self._recomputation(forward, {path: module})
        ordinals = {b.calls[0].ordinal for b in self.recomputed if b.calls[0].path == path}
        calls = count()

        def run(*args: Any, **kwargs: Any) -> Any:
            ordinal = next(calls)
            # One call more than were seen: to recompute it is what costs no memory.
            is_chosen = ordinal in ordinals or ordinal >= self.calls_seen[path]
            return (again if is_chosen else forward)(*args, **kwargs)

        return run

    def _sequence(self, sequence: nn.Module, path: str, runs: list[Block]) -> Callable[[Any], Any]:
        """An nn.Sequential's forward, parts of it as one block each."""
        children = list(sequence.named_children())
        parts: list[Callable[[Any], Any]] = []
        position = 0
        while position < len(children):
            length = self._run_at(path, position, runs)
            inside = children[position : position + length]
            names = {f"{path}.{name}" if path else name: module for name, module in inside}
            if length > 1:
                parts.append(self._recomputation(partial(_one_after_the_other, [m for _, m in inside]), names))
            else:
                parts.append(inside[0][1])
            position += length
        return partial(_one_after_the_other, parts)

    @staticmethod
    def _run_at(path: str, position: int, runs: list[Block]) -> int:
        for block in runs:
            if block.calls[0].path.rpartition(".")[0] == path and block.calls[0].position == position:
                return len(block.calls)
        return 1

    def _recomputation(self, forward: Callable[..., Any], modules: dict[str, nn.Module]) -> Recomputation:
        inner = {path: m for top, module in modules.items() for path, m in module.named_modules(prefix=top)}
        return Recomputation(forward, inner, self.written)


def _one_after_the_other(modules: list[Callable[[Any], Any]], x: Any) -> Any:
    for module in modules:
        x = module(x)
    return x


def sizes_of(batch: Any) -> tuple[int, ...]:
    """How large each tensor of a batch is."""
    return tuple(leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
