"""What is known of ops that communicate with other processes: what they hold, and which of them may run twice.

A collective is launched by one op and waited for by another. What the launch reads stays in memory until the wait.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from planner.ir import CollectiveKind

NAMESPACE = "_c10d_functional"

# Key of `node.meta`: the node stands for what the model's wrapper (DistributedDataParallel) does in its own hooks.
COMMUNICATION = "communication"

_WAIT = "wait_tensor"

# The same bits each time, however often: they read memory that nobody writes to between two runs.
_REPEATABLE = frozenset({_WAIT, "all_gather_into_tensor"})


_KINDS = {
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "all_reduce_": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "broadcast_": CollectiveKind.BROADCAST,
    "broadcast": CollectiveKind.BROADCAST,
}


def launch_of(node: fx.Node) -> fx.Node | None:
    """The node that launches the collective which a node launches or waits for; None for all other ops."""
    launch = node.args[0] if is_wait(node) else node
    return launch if isinstance(launch, fx.Node) and is_collective(launch) else None


def kind_of(launch: fx.Node) -> CollectiveKind:
    """What the collective that a node launches does."""
    return _KINDS.get(_name(launch), CollectiveKind.OTHER)


def group_name(launch: fx.Node) -> str:
    """The name of the group in which a node launches a collective: its last argument."""
    return str(launch.args[-1])


def whole_bytes(launch: fx.Node) -> int:
    """The bytes of a collective: the larger of what it is given and what it makes."""
    tensors = [launch.meta["val"], *(one.meta["val"] for one in launch.all_input_nodes)]
    return max(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _name(node: fx.Node) -> str:
    """The collective that a node launches, or `wait_tensor`; "" for all other ops."""
    op = node.target
    return str(op.overloadpacket.__name__) if isinstance(op, OpOverload) and op.namespace == NAMESPACE else ""


def communicates(target: str) -> bool:
    """Whether an op of the typed graph, by its target, launches a collective or waits for one."""
    return target.startswith(f"{NAMESPACE}.")


def is_collective(node: fx.Node) -> bool:
    """Whether a node launches a collective or waits for one."""
    return bool(_name(node))


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return _name(node) == _WAIT


def why_run_once(node: fx.Node) -> str:
    """Why a collective is never run a second time, or ""."""
    name = _name(node)
    return "" if not name or name in _REPEATABLE else "sums or sends what all processes have at this point"


def makes_new(wait: fx.Node) -> bool:
    """Whether the collective that a node waits for makes its result, and does not write over what it was given."""
    launch = launch_of(wait)
    return launch is not None and not _name(launch).endswith("_")


def held_until(node: fx.Node) -> tuple[fx.Node, ...]:
    """What the launch that `node` waits for reads: it is in memory until then. Empty for all other ops."""
    if not is_wait(node):
        return ()
    launch = node.args[0]
    assert isinstance(launch, fx.Node)
    return tuple(launch.all_input_nodes) if is_collective(launch) else ()


def sequence_of(graph: fx.Graph) -> tuple[str, ...]:
    """The collectives that a graph runs, in order, in words that mean the same on every rank."""
    groups: dict[str, int] = {}
    return tuple(_told(node, groups) for node in graph.nodes if is_collective(node))


def _told(node: fx.Node, groups: dict[str, int]) -> str:
    value = node.meta.get("val")
    shape = list(value.shape) if isinstance(value, Tensor) else []
    numbers = [_plain(arg, groups) for arg in node.args if not isinstance(arg, fx.Node)]
    return f"{_name(node)} {shape} {getattr(value, 'dtype', None)} {numbers}"


def _plain(arg: Any, groups: dict[str, int]) -> Any:
    """An argument; of a group, whose name may differ from rank to rank, when it was first used."""
    is_group = isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product")
    return f"group {groups.setdefault(arg, len(groups))}" if is_group else arg


def digest(words: object) -> str:
    """A short name for plain data that is equal on all ranks where the data are."""
    return hashlib.sha256(json.dumps(words, separators=(",", ":"), default=str).encode()).hexdigest()


def operators() -> Any:
    """torch's functional collectives, with the shapes that they make."""
    import torch.distributed._functional_collectives  # which registers them

    return torch.ops._c10d_functional
