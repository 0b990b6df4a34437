"""The optimizer as the graph assumes it: its groups, the numbers in them, and what runs when it is stepped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from operator import is_
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from profiler.tracing.guards.exact import exactly_equal


def own_step(optimizer: Optimizer) -> Any:
    """What `optimizer.step()` runs: its class's own, or what was put in its place; schedulers only count the calls."""
    step = vars(optimizer).get("step", type(optimizer).step)
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return step


def only_watches(hook: Any) -> Any:
    """Mark a step hook of ours, which leaves everything as it is: no step has to run as itself for its sake."""
    hook.only_watches = True
    return hook


def global_step_hooks() -> list[Any]:
    """The hooks around the step of every optimizer, but those that only watch."""
    every = (optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)
    return [hook for hooks in every for hook in hooks.values() if not getattr(hook, "only_watches", False)]


def frozen(value: Any) -> Any:
    """A number of a group as it is now: a list in it may change in place."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(frozen, value))
    return (dict, *((key, frozen(one)) for key, one in value.items())) if isinstance(value, dict) else value


def _unchanged(then: Any, now: Any) -> bool:
    if isinstance(then, tuple) and isinstance(now, tuple):
        return len(then) == len(now) and all(map(_unchanged, then, now))
    return exactly_equal(then, now)


@dataclass(frozen=True, kw_only=True)
class OptimizerGuard:
    """An optimizer as it was. `numbers` are those that are baked in, with the group and the name of each."""

    groups: tuple[tuple[Tensor, ...], ...]
    numbers: tuple[tuple[int, str, Any], ...]  # frozen
    step: Any  # None where it runs outside the graph, as whatever it then is

    @staticmethod
    def of(optimizer: Optimizer, *, baked: set[tuple[int, str]], traced: bool) -> OptimizerGuard:
        """The guard that the optimizer meets now; `traced` says that its arithmetic is in the graph."""
        groups = optimizer.param_groups
        return OptimizerGuard(
            groups=tuple(tuple(group["params"]) for group in groups),
            numbers=tuple((i, key, frozen(groups[i].get(key))) for i, key in sorted(baked)),
            step=own_step(optimizer) if traced else None,
        )

    def mismatches(self, optimizer: Optimizer) -> Iterator[str]:
        """What differs, one sentence each."""
        yield from self._group_mismatches(optimizer)
        yield from self.changed_numbers(optimizer)
        if self.step is not None:
            yield from self._untraced(optimizer)

    def changed_numbers(self, optimizer: Optimizer) -> list[str]:
        """What differs in the optimizer's numbers alone; one that runs outside the graph reads them anew."""
        groups = optimizer.param_groups
        pairs = [(i, key, kept, groups[i].get(key)) for i, key, kept in self.numbers if i < len(groups)]
        return [
            f"{key!r} of optimizer group {i} was {_thawed(kept)} and is {now!r}"
            for i, key, kept, now in pairs
            if not _unchanged(kept, frozen(now))
        ]

    def _group_mismatches(self, optimizer: Optimizer) -> Iterator[str]:
        if len(optimizer.param_groups) != len(self.groups):
            yield f"the optimizer had {len(self.groups)} parameter groups and has {len(optimizer.param_groups)}"
            return
        for i, (group, params) in enumerate(zip(optimizer.param_groups, self.groups, strict=True)):
            if len(group["params"]) != len(params) or not all(map(is_, group["params"], params)):
                yield f"the parameters of optimizer group {i} are not those of the captured step"

    def _untraced(self, optimizer: Optimizer) -> Iterator[str]:
        """What an optimizer inside the graph cannot have, and may have been given since."""
        if getattr(optimizer, "_optimizer_step_pre_hooks", None) or getattr(
            optimizer, "_optimizer_step_post_hooks", None
        ):
            yield "the optimizer was given a step hook"
        if global_step_hooks():
            yield "all optimizers were given a step hook"
        if own_step(optimizer) is not self.step:
            yield "the optimizer was given another step"
        for i, group in enumerate(optimizer.param_groups):
            if not isinstance(group["lr"], Real):
                yield f"the learning rate of optimizer group {i} was a number and is a {type(group['lr']).__name__}"


def _thawed(kept: Any) -> str:
    """What was frozen, as it was."""
    return repr(_melted(kept))


def _melted(kept: Any) -> Any:
    if not isinstance(kept, tuple) or not kept or not isinstance(kept[0], type):
        return kept
    return kept[0](map(_melted, kept[1:]))
