"""How far two observations of the same step are apart."""

from __future__ import annotations

from torch import Tensor, float64

from rewriter.proof import Observation

# Beyond this, relative to the largest entry of a tensor, a difference is no rounding.
ROUNDING = 1e-3


def relative_difference(expected: Observation, actual: Observation) -> float:
    """The largest difference of any tensor, each relative to the largest entry that it should have.

    Digests, generators and other whole numbers are left out: they differ or do not.
    """
    worst = 0.0
    for key, a in expected.tensors.items():
        b = actual.tensors.get(key)
        if b is None or a.shape != b.shape:
            return float("inf")
        worst = max(worst, difference_of(a, b))
    return worst


def difference_of(expected: Tensor, actual: Tensor) -> float:
    """The largest difference of two tensors of one shape, relative to the largest entry; of whole numbers, none."""
    if not expected.is_floating_point() or not expected.numel():
        return 0.0
    difference = float((expected.to(float64) - actual.to(float64)).abs().max())
    return difference / max(float(expected.to(float64).abs().max()), 1e-30) if difference else 0.0
