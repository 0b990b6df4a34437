"""How well estimated op times follow measured ones: sums, ranks and errors, over a step and by kind of op."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.experiments.calibration.rows import KindRow, Sums, Times
from profiler.estimating.kinds import OpKind

# Kinds that share a colour in the figure.
GROUPS = {
    OpKind.MATMUL: "matrix products, attention",
    OpKind.ATTENTION: "matrix products, attention",
    OpKind.ATTENTION_BACKWARD: "matrix products, attention",
    OpKind.CONVOLUTION: "convolutions",
    OpKind.CONVOLUTION_BACKWARD: "convolutions",
    OpKind.DEPTHWISE: "depthwise convolutions",
    OpKind.DEPTHWISE_BACKWARD: "depthwise convolutions",
    OpKind.NORM: "norms",
    OpKind.NORM_BACKWARD: "norms",
    OpKind.SOFTMAX: "softmax, reductions, pooling",
    OpKind.REDUCTION: "softmax, reductions, pooling",
    OpKind.POOLING: "softmax, reductions, pooling",
    OpKind.ELEMENTWISE: "elementwise",
    OpKind.TRANSCENDENTAL: "elementwise",
    OpKind.RANDOM: "random, lookups, updates, other",
    OpKind.LOOKUP: "random, lookups, updates, other",
    OpKind.UPDATE: "random, lookups, updates, other",
    OpKind.OTHER: "random, lookups, updates, other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One op that is not a view."""

    kind: OpKind
    estimated_us: float
    measured_us: float


def sums_of(found: Sequence[Point]) -> Sums:
    """How much the estimates of some ops are off, in all."""
    taken_us = sum(p.measured_us for p in found)
    return Sums(
        ops=len(found),
        estimated_us=sum(p.estimated_us for p in found),
        measured_us=taken_us,
        median_factor=median_factor(found),
        misplaced_share=sum(abs(p.estimated_us - p.measured_us) for p in found) / taken_us,
    )


def median_factor(found: Sequence[Point]) -> float:
    """How far off the middle op is, as a factor: 2.0 is twice or half as long."""
    return math.exp(statistics.median(abs(math.log(p.estimated_us / p.measured_us)) for p in found))


def by_kind(found: Sequence[Point]) -> tuple[KindRow, ...]:
    """Sums and errors of each kind, the dearest first."""
    kinds = {kind: [p for p in found if p.kind is kind] for kind in OpKind}
    rows = [KindRow(kind=kind, **asdict(sums_of(ours))) for kind, ours in kinds.items() if ours]
    return tuple(sorted(rows, key=lambda row: -row.measured_us))


def rank_correlations(found: Sequence[Point]) -> tuple[float | None, float | None]:
    """Spearman's over all ops, and the same with each op weighed by its measured time."""
    guessed, taken = [p.estimated_us for p in found], [p.measured_us for p in found]
    return spearman(guessed, taken), spearman(guessed, taken, weights=taken)


def spearman(a: Sequence[float], b: Sequence[float], *, weights: Sequence[float] | None = None) -> float | None:
    """The correlation of ranks, ties at their mean rank; with `weights`, of both ranks under these weights.

    None where all values of one side are equal.
    """
    x, y = ranks(a), ranks(b)
    w = list(weights) if weights is not None else [1.0] * len(x)
    total = sum(w)
    mean_x, mean_y = (sum(wi * r for wi, r in zip(w, z, strict=True)) / total for z in (x, y))
    rows = list(zip(w, x, y, strict=True))
    covariance = sum(wi * (p - mean_x) * (q - mean_y) for wi, p, q in rows)
    spread = math.sqrt(
        sum(wi * (p - mean_x) ** 2 for wi, p, _ in rows) * sum(wi * (q - mean_y) ** 2 for wi, _, q in rows)
    )
    return covariance / spread if spread else None


def ranks(values: Sequence[float]) -> list[float]:
    """From 1 for the smallest; equal values share the mean of their places."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    for i in range(1, len(order) + 1):
        if i < len(order) and values[order[i]] == values[order[start]]:
            continue
        for place in order[start:i]:
            found[place] = (start + i + 1) / 2
        start = i
    return found


def by_group(found: Sequence[Point]) -> dict[str, Times]:
    """Times as the figure shows them, four digits each: column by column, which keeps the file short."""
    groups: dict[str, list[Point]] = {}
    for point in found:
        groups.setdefault(GROUPS[point.kind], []).append(point)
    return {
        group: Times(
            estimated_us=tuple(float(f"{p.estimated_us:.4g}") for p in points),
            measured_us=tuple(float(f"{p.measured_us:.4g}") for p in points),
        )
        for group, points in groups.items()
    }
