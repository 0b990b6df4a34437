"""The law for another batch: what is made of tensors is affine in it, so two sizes tell all others.

`Scaling` has the step at two sizes. `with_times_of` has it at the size asked for, but its times only at another: they
are taken to grow and shrink in proportion to the op's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from planner.errors import GraphError
from planner.ir import Graph, Op, Storage, Timing, TimingKind, Value


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The step at any batch: `low` and `high` are its graphs at two sizes, and must be the same op for op.

    Bytes and shapes are exact where they are affine in the batch, as they are unless a tensor holds batch x batch
    elements or is padded to a size; `deviation` checks it against a third graph. Measured times and workspaces follow
    the straight line through the two, which holds for an op that is bound by the same thing at all sizes.
    """

    low: Graph
    high: Graph
    low_batch: int
    high_batch: int

    def __post_init__(self) -> None:
        if not 0 < self.low_batch < self.high_batch:
            raise GraphError(f"batches {self.low_batch} and {self.high_batch}: give two, the smaller first")
        if reason := difference(self.low, self.high):
            raise GraphError(
                f"{self.low.name}: the steps at batch {self.low_batch} and {self.high_batch} are not the same: {reason}"
            )

    def share(self, batch: int) -> Fraction:
        """Where `batch` lies on the line through the two: 0 at the lower, 1 at the higher, beyond them further."""
        return Fraction(batch - self.low_batch, self.high_batch - self.low_batch)

    def at(self, batch: int) -> Graph:
        """The graph at `batch`."""
        share = self.share(batch)
        storages = tuple(_storage(a, b, share) for a, b in zip(self.low.storages, self.high.storages, strict=True))
        values = tuple(_value(a, b, share) for a, b in zip(self.low.values, self.high.values, strict=True))
        ops = tuple(_op(a, b, float(share)) for a, b in zip(self.low.ops, self.high.ops, strict=True))
        return replace(self.low, ops=ops, values=values, storages=storages)  # as valid as the two: sizes alone differ

    def deviation(self, graph: Graph, batch: int) -> str:
        """Where the graph captured at `batch` is not the predicted one, to the byte; "" where it is."""
        if reason := difference(self.low, graph):
            return f"at batch {batch} the step is not the same: {reason}"
        predicted = self.at(batch)
        for expected, found in zip(predicted.storages, graph.storages, strict=True):
            if expected.nbytes != found.nbytes:
                name = graph.storage_names[found.id]
                return f"at batch {batch} {name!r} has {found.nbytes:,} bytes, not {expected.nbytes:,}"
        return ""


def difference(a: Graph, b: Graph) -> str:
    """The first thing, other than sizes, in which two graphs differ; "" where there is none."""
    if len(a.ops) != len(b.ops):
        return f"{len(a.ops)} ops and {len(b.ops)}"
    for left, right in zip(a.ops, b.ops, strict=True):
        if _structure(left) != _structure(right):
            return f"op {left.id} is {left.name!r} ({left.target}) and {right.name!r} ({right.target})"
    if len(a.values) != len(b.values):
        return f"{len(a.values)} values and {len(b.values)}"
    if [s.role for s in a.storages] != [s.role for s in b.storages] or a.outputs != b.outputs:
        return "their storages are not for the same things"
    for u, v in zip(a.values, b.values, strict=True):
        if (u.storage, u.producer, u.base, u.dtype, len(u.shape)) != (
            v.storage,
            v.producer,
            v.base,
            v.dtype,
            len(v.shape),
        ):
            return f"value {u.name!r} is another"
    return ""


def _structure(op: Op) -> Op:
    return replace(op, time_us=0.0, workspace_bytes=0)


def _between(low: int, high: int, share: Fraction) -> int:
    # Rounded up, and never below nothing, where the line is not one of whole numbers.
    return low if low == high else max(0, -(-(low + (high - low) * share) // 1))


def _storage(low: Storage, high: Storage, share: Fraction) -> Storage:
    return low if low.nbytes == high.nbytes else replace(low, nbytes=_between(low.nbytes, high.nbytes, share))


def _value(low: Value, high: Value, share: Fraction) -> Value:
    if low.shape == high.shape:
        return low
    return replace(low, shape=tuple(_between(a, b, share) for a, b in zip(low.shape, high.shape, strict=True)))


def _op(low: Op, high: Op, share: float) -> Op:
    if low.time_us == high.time_us and low.workspace_bytes == high.workspace_bytes:
        return low
    workspace = along(low.workspace_bytes, high.workspace_bytes, share)
    return replace(low, time_us=along(low.time_us, high.time_us, share), workspace_bytes=round(workspace))


def along(low: float, high: float, share: float) -> float:
    """What lies at `share` of the straight line from `low` (0) through `high` (1), never below nothing."""
    return max(0.0, low + (high - low) * share)


def with_times_of(graph: Graph, measured: Graph) -> Graph:
    """`graph` with times and workspaces of the same ops at another batch, in proportion to their tensors."""
    known = {op.name: op for op in measured.ops}
    ops = tuple(_grown(graph, op, measured, known[op.name]) if op.name in known else op for op in graph.ops)
    timing = Timing(kind=TimingKind.ESTIMATED, device=f"this machine, scaled from {measured.name}")
    return replace(graph, ops=ops, timing=timing).validate()


def _grown(graph: Graph, op: Op, measured: Graph, source: Op) -> Op:
    """An op slowed by its largest-grown tensor, read or made: a weight's gradient reads the batch.

    Where none has grown, it is as much faster as its most shrunken tensor is smaller, for the same reason.
    """
    if (len(op.inputs), len(op.outputs)) != (len(source.inputs), len(source.outputs)):
        raise GraphError(f"op {op.name!r} of {graph.name} is another in {measured.name}: its times say nothing of it")
    now, before = (
        [g.storages[g.values[v].storage].nbytes for v in (*o.inputs, *o.outputs)]
        for g, o in ((graph, op), (measured, source))
    )
    ratios = [n / m for n, m in zip(now, before, strict=True) if m] or [1.0]
    factor = max(ratios) if max(ratios) > 1 else min(ratios)
    return replace(op, time_us=source.time_us * factor, workspace_bytes=round(source.workspace_bytes * factor))


def in_proportion(graph: Graph, factor: float) -> Graph:
    """The step at a batch `factor` times as large, where it is known at one size only: all that it makes, and times.

    An estimate: what does not grow with the batch (gradients of weights) is taken to, and what grows faster is not.
    """
    made = [made is not None for made in graph.maker]
    storages = tuple(replace(s, nbytes=round(s.nbytes * factor)) if made[s.id] else s for s in graph.storages)
    ops = tuple(
        replace(op, time_us=op.time_us * factor, workspace_bytes=round(op.workspace_bytes * factor)) for op in graph.ops
    )
    timing = Timing(kind=TimingKind.ESTIMATED, device=f"this machine, {factor:.2f} times {graph.name}")
    return replace(graph, ops=ops, storages=storages, timing=timing).validate()
