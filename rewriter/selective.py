"""A policy file carried out by PyTorch's selective activation checkpointing.

policy = Policy.load("policy.json")
y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=context_fn(policy, model, "layers.3"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.errors import PlannerError
from planner.exports.policy import Fate, Policy

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

# What a version of PyTorch without copies to the host does instead: keep.
_OFFLOAD = getattr(CheckpointPolicy, "PREFER_CPU_OFFLOAD", CheckpointPolicy.PREFER_SAVE)
_ANSWERS = {
    Fate.SAVE: CheckpointPolicy.PREFER_SAVE,
    Fate.RECOMPUTE: CheckpointPolicy.PREFER_RECOMPUTE,
    Fate.OFFLOAD: _OFFLOAD,
}


def context_fn(policy: Policy, model: nn.Module, block: str) -> Callable[[], Contexts]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` for the block of that path in `model`.

    PlannerError if there is no such block, or if the policy says nothing of it: then it is for another model.
    """
    try:
        module = model.get_submodule(block)
    except AttributeError:
        raise PlannerError(f"the model has no module {block!r}: give a path as in model.named_modules()") from None
    if not any(_is_inside(rule.module, block) for rule in policy.rules):
        raise PlannerError(
            f"the policy of {policy.graph_name!r} has no rule for {block!r}: it is for another model, or nothing that "
            "the backward reads is made there"
        )
    return lambda: _contexts(policy, module, block)


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.") or not block


def _contexts(policy: Policy, module: nn.Module, block: str) -> Contexts:
    where = _Where(module, block)
    decide = _Decision(policy, where)
    saving, using = create_selective_checkpoint_contexts(decide)  # type: ignore[no-untyped-call]
    return _both(where, decide, saving), _both(where, decide, using)


@contextmanager
def _both(where: _Where, decide: _Decision, mode: AbstractContextManager[Any]) -> Iterator[None]:
    decide.begin()
    with where.followed(), mode:
        yield


class _Where:
    """The path of the module that runs, while it is followed."""

    def __init__(self, module: nn.Module, block: str) -> None:
        self._module, self._block = module, block
        self._stack = [block]

    @property
    def path(self) -> str:
        return self._stack[-1]

    @contextmanager
    def followed(self) -> Iterator[None]:
        self._stack = [self._block]
        handles = []
        for name, module in self._module.named_modules():
            if not name:
                continue
            path = f"{self._block}.{name}" if self._block else name
            handles.append(module.register_forward_pre_hook(self._entering(path)))
            handles.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._stack.append(path)

        return enter

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()


class _Decision:
    """Answers for the n-th call of an op in a module what the policy says of it; all else is recomputed."""

    def __init__(self, policy: Policy, where: _Where) -> None:
        self._rules = {(rule.module, rule.op): rule.calls for rule in policy.rules}
        self._where = where
        self._calls: Counter[tuple[str, str]] = Counter()

    def begin(self) -> None:
        self._calls.clear()

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(op).split(".")[1]
        if name.endswith("_"):  # its output is its input, which may be written to again
            return CheckpointPolicy.PREFER_RECOMPUTE
        key = (self._where.path, name)
        fates, call = self._rules.get(key, ()), self._calls[key]
        self._calls[key] += 1
        return _ANSWERS[fates[call]] if call < len(fates) else CheckpointPolicy.PREFER_RECOMPUTE
