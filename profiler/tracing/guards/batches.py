"""The batch as the graph assumes it: its tree, the tensors in it, and those plain values that the step reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from profiler.tracing.guards.exact import UNSET, exactly_equal, was_and_is
from profiler.tracing.guards.kinds import attributes_of
from profiler.tracing.guards.tensors import TensorSpec


@dataclass(frozen=True, kw_only=True)
class TensorLeaf:
    """A tensor of the batch: what it is, and the first leaf that is the same tensor."""

    spec: TensorSpec
    requires_grad: bool
    first: int
    attributes: Mapping[str, Any]  # what the user has set on it, of what the step reads


@dataclass(frozen=True, kw_only=True)
class PlainLeaf:
    """A plain value of the batch, and where it lies in it."""

    value: Any
    path: str


@dataclass(frozen=True, kw_only=True)
class BatchGuard:
    """A batch as it was; a leaf that the step never reads is None."""

    tree: pytree.TreeSpec
    leaves: tuple[TensorLeaf | PlainLeaf | None, ...]
    names: frozenset[str] = frozenset()  # of the attributes that the step reads of whatever it has

    @staticmethod
    def of(batch: Any, *, unread: Collection[int] = (), names: frozenset[str] = frozenset()) -> BatchGuard:
        """The guard that `batch` meets."""
        leaves, tree = pytree.tree_flatten(batch)
        paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(batch)[0]]
        first = _firsts(leaves)
        found: list[TensorLeaf | PlainLeaf | None] = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                spec, own = TensorSpec.of(leaf), _attributes(leaf, names)
                found.append(TensorLeaf(spec=spec, requires_grad=leaf.requires_grad, first=first[i], attributes=own))
            else:
                found.append(None if i in unread else PlainLeaf(value=leaf, path=paths[i]))
        return BatchGuard(tree=tree, leaves=tuple(found), names=names)

    def changed_entries(self, batch: Any) -> list[str]:
        """The plain values that the step reads and that differ, by their places; none where the tree differs."""
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self.tree:
            return []
        pairs = zip(self.leaves, leaves, strict=True)
        plain = [(then, leaf) for then, leaf in pairs if isinstance(then, PlainLeaf)]
        return [f"batch{then.path}" for then, leaf in plain if not exactly_equal(then.value, leaf)]

    def mismatches(self, batch: Any) -> Iterator[str]:
        """What differs, one sentence each."""
        leaves, tree = pytree.tree_flatten(batch)
        if tree != self.tree:
            yield f"the batch was a {self.tree} and is a {tree}"
            return
        firsts = _firsts(leaves)
        for i, (then, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if isinstance(then, TensorLeaf):
                yield from _tensor_mismatches(i, then, leaf, firsts[i])
                yield from _other_attributes(i, then, leaf, self.names)
            elif isinstance(then, PlainLeaf) and not exactly_equal(then.value, leaf):
                yield was_and_is(f"batch leaf {i} (batch{then.path})", then.value, leaf)


def _firsts(leaves: Sequence[Any]) -> list[int]:
    """For each leaf the first one that is the same tensor."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), i) if isinstance(leaf, Tensor) else i for i, leaf in enumerate(leaves)]


def _attributes(tensor: Tensor, names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in attributes_of(tensor).items() if name in names}


def _other_attributes(i: int, then: TensorLeaf, leaf: Any, names: frozenset[str]) -> Iterator[str]:
    now = _attributes(leaf, names) if isinstance(leaf, Tensor) else then.attributes
    for name in dict.fromkeys((*then.attributes, *now)):
        was, is_now = then.attributes.get(name, UNSET), now.get(name, UNSET)
        if not exactly_equal(was, is_now):
            yield was_and_is(f"batch leaf {i}.{name}", was, is_now)


def _tensor_mismatches(i: int, then: TensorLeaf, leaf: Any, first: int) -> Iterator[str]:
    if not isinstance(leaf, Tensor):
        yield f"batch leaf {i} was {then.spec} and is {leaf!r}"
        return
    if not then.spec.fits(leaf):
        yield f"batch leaf {i} was {then.spec} and is {TensorSpec.of(leaf)}"
    if leaf.requires_grad != then.requires_grad:
        yield f"batch leaf {i}.requires_grad was {then.requires_grad} and is {leaf.requires_grad}"
    if then.requires_grad and first != then.first:  # else nothing is added up in it
        was, is_now = (("itself" if k == i else f"batch leaf {k}") for k in (then.first, first))
        yield f"batch leaf {i} was {was} and is {is_now}"
