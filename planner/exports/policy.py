"""A plan as a policy for selective activation checkpointing: by module, op and call, what is saved.

For trainers that wrap blocks in `torch.utils.checkpoint` and take a policy. Much of a plan has no place in one:
`Policy.lost` says what, and the file carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from planner import files
from planner.analysis import candidates
from planner.ir import Graph, Op, Phase
from planner.plan import Restore
from planner.solve import Solution
from planner.units import human_bytes

POLICY_SCHEMA = 1


class Fate(Enum):
    """What becomes of an op's output between forward and backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The calls of one op in one module, in the order of the forward."""

    module: str
    op: str  # without namespace, overload and the mark of an in-place form: "convolution"
    calls: tuple[Fate, ...]
    saved_bytes: int
    dropped_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rules for every op of the forward that makes something the backward reads. All else is recomputed."""

    graph_name: str
    strategy: str
    rules: tuple[Rule, ...]
    lost: tuple[str, ...]

    def save(self, path: str | Path) -> None:
        """Write it as JSON; FileFormatError where that cannot be."""
        files.save(path, kind="policy", schema=POLICY_SCHEMA, record=self)

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Read what `save` wrote; FileFormatError says what is wrong with any other file."""
        return files.load(path, kind="policy", schema=POLICY_SCHEMA, cls=Policy)


def policy_of(solution: Solution) -> Policy:
    """What the plan keeps, drops and moves, as a policy by module, op and call."""
    assert solution.plan is not None
    graph = solution.problem.graph
    fates = _fates(solution)
    calls: dict[tuple[str, str], list[tuple[Fate, int]]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and any(s in fates for s in graph.makes[op.id]):
            calls.setdefault((op.module_path, op_name(op)), []).append(_fate_of_op(graph, op, fates))
    rules = [_rule(module, name, found) for (module, name), found in calls.items()]
    return Policy(graph_name=graph.name, strategy=solution.strategy, rules=tuple(rules), lost=_lost(solution, rules))


def _fate_of_op(graph: Graph, op: Op, fates: dict[int, Fate]) -> tuple[Fate, int]:
    """What becomes of most of what an op makes, and how many bytes that is: a policy cannot tell its outputs apart."""
    nbytes = dict.fromkeys(Fate, 0)
    for storage in graph.makes[op.id]:
        nbytes[fates.get(storage, Fate.RECOMPUTE)] += graph.storages[storage].nbytes
    return max(Fate, key=lambda fate: nbytes[fate]), sum(nbytes.values())


def _fates(solution: Solution) -> dict[int, Fate]:
    """What becomes of every activation that a plan may drop."""
    fates = dict.fromkeys(candidates(solution.problem.graph), Fate.SAVE)
    for eviction in solution.plan.evictions if solution.plan else ():
        if eviction.storage in fates:
            fates[eviction.storage] = Fate.RECOMPUTE if eviction.how is Restore.RECOMPUTE else Fate.OFFLOAD
    return fates


def op_name(op: Op) -> str:
    """'convolution' for 'aten.convolution.default', 'bernoulli' for 'fresh aten.bernoulli_.float'."""
    pieces = op.target.split(" ")[-1].split(".")
    return (pieces[1] if len(pieces) > 1 else pieces[0]).rstrip("_")


def _rule(module: str, name: str, found: Sequence[tuple[Fate, int]]) -> Rule:
    saved = sum(nbytes for fate, nbytes in found if fate is Fate.SAVE)
    return Rule(
        module=module,
        op=name,
        calls=tuple(fate for fate, _ in found),
        saved_bytes=saved,
        dropped_bytes=sum(nbytes for _, nbytes in found) - saved,
    )


def _lost(solution: Solution, rules: Sequence[Rule]) -> tuple[str, ...]:
    """What of the plan a policy cannot say."""
    graph, limit = solution.problem.graph, human_bytes(solution.problem.budget_bytes)
    lost = [
        f"The budget of {limit} is not kept: torch.utils.checkpoint brings a whole block back at once, and what one "
        "block needs for that is not in the plan.",
        "When a tensor is freed, and before which op it comes back, is the block's: only what is saved is ours.",
        "An op with several outputs is saved or recomputed whole, as most of its bytes are.",
    ]
    if _counts_twice(graph):
        lost.append("Batch norms run twice and count their statistics twice, as always under torch.utils.checkpoint.")
    nowhere = sum(rule.saved_bytes for rule in rules if not rule.module)
    if nowhere:
        lost.append(f"{human_bytes(nowhere)} are made outside of every module, where no block can be wrapped.")
    if any(Fate.OFFLOAD in rule.calls for rule in rules):
        lost.append("What is moved to the host is moved by PyTorch's own copies, where its version has them.")
    return tuple(lost)


def _counts_twice(graph: Graph) -> bool:
    return any("batch_norm" in op.target and op.phase is Phase.FORWARD for op in graph.ops)
