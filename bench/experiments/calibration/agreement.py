"""How well estimated op times follow measured ones: sums, ranks and errors, over a step and by kind of op."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def agreement(found: Sequence[Point]) -> dict[str, Any]:
    """How well the estimates of one step follow its measured times."""
    guessed, taken = [p.estimated_us for p in found], [p.measured_us for p in found]
    off_us = sum(abs(p.estimated_us - p.measured_us) for p in found)
    return {
        "ops": len(found),
        "estimated_us": sum(guessed),
        "measured_us": sum(taken),
        "rank_correlation": spearman(guessed, taken),
        "weighted_rank_correlation": spearman(guessed, taken, weights=taken),
        "median_factor": median_factor(found),
        "misplaced_share": off_us / sum(taken),  # Σ|estimated - measured| to Σ measured
    }


def median_factor(found: Sequence[Point]) -> float:
    """How far off the middle op is, as a factor: 2.0 is twice or half as long."""
    return math.exp(statistics.median(abs(math.log(p.estimated_us / p.measured_us)) for p in found))


def by_kind(found: Sequence[Point]) -> list[dict[str, Any]]:
    """Sums and errors of each kind, the dearest first."""
    rows = []
    for kind in OpKind:
        ours = [p for p in found if p.kind is kind]
        if ours:
            sums = {key: value for key, value in agreement(ours).items() if "rank" not in key}
            rows.append({"kind": kind.value, **sums})
    return sorted(rows, key=lambda row: -row["measured_us"])


def spearman(a: Sequence[float], b: Sequence[float], *, weights: Sequence[float] | None = None) -> float:
    """The correlation of ranks, ties at their mean rank; with `weights`, of both ranks under these weights."""
    x, y = ranks(a), ranks(b)
    w = list(weights) if weights is not None else [1.0] * len(x)
    total = sum(w)
    mean_x, mean_y = (sum(wi * r for wi, r in zip(w, z, strict=True)) / total for z in (x, y))
    rows = list(zip(w, x, y, strict=True))
    covariance = sum(wi * (p - mean_x) * (q - mean_y) for wi, p, q in rows)
    spread = math.sqrt(
        sum(wi * (p - mean_x) ** 2 for wi, p, _ in rows) * sum(wi * (q - mean_y) ** 2 for wi, _, q in rows)
    )
    return covariance / spread if spread else math.nan


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


def by_group(found: Sequence[Point]) -> dict[str, dict[str, list[float]]]:
    """Times as the figure shows them, four digits each: column by column, which keeps the file short."""
    columns: dict[str, dict[str, list[float]]] = {}
    for point in found:
        column = columns.setdefault(GROUPS[point.kind], {"estimated_us": [], "measured_us": []})
        column["estimated_us"].append(float(f"{point.estimated_us:.4g}"))
        column["measured_us"].append(float(f"{point.measured_us:.4g}"))
    return columns
