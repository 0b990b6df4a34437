"""Linear programs as sparse arrays, and the expressions that their rows are made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SparseModel:
    """Minimise `offset + cost @ x` with `least ≤ x ≤ most` and `lower ≤ matrix @ x` (CSR); `integer` x are whole."""

    cost: Floats
    offset: float
    integer: npt.NDArray[np.bool_]
    least: Floats
    most: Floats
    starts: Ints
    columns: Ints
    coefficients: Floats
    lower: Floats

    @property
    def n_variables(self) -> int:
        return len(self.cost)

    @property
    def n_rows(self) -> int:
        return len(self.lower)

    def relaxed(self) -> SparseModel:
        """The same program with no x whole."""
        return replace(self, integer=np.zeros(self.n_variables, dtype=np.bool_))

    def near(self, point: Floats) -> SparseModel:
        """The same program where every whole x that already is whole in `point` stays as it is there."""
        low, high = self.integer & (point < 1e-6), self.integer & (point > 1 - 1e-6)
        return replace(self, least=np.where(high, 1.0, self.least), most=np.where(low, 0.0, self.most))

    def cheaper_than(self, value: float) -> SparseModel:
        """The same program without the points that cost `value` or more."""
        costly = np.flatnonzero(self.cost)
        unit = max(abs(value), 1e-9) / 100
        return replace(
            self,
            starts=np.append(self.starts, self.starts[-1] + len(costly)),
            columns=np.concatenate((self.columns, costly)),
            coefficients=np.concatenate((self.coefficients, -self.cost[costly] / unit)),
            lower=np.append(self.lower, (self.offset - value) / unit),
        )

    def fixed(self, values: dict[int, float]) -> SparseModel:
        """The same program where these variables have these values."""
        least, most = self.least.copy(), self.most.copy()
        for variable, value in values.items():
            least[variable] = most[variable] = value
        return replace(self, least=least, most=most)


class Linear:
    """A linear expression: a constant and coefficients by variable."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: float = 0.0, terms: dict[int, float] | None = None) -> None:
        self.constant = constant
        self.terms = terms if terms is not None else {}

    def add(self, other: Linear, factor: float = 1.0) -> Linear:
        self.constant += factor * other.constant
        terms = self.terms
        if not terms and factor == 1.0:
            terms.update(other.terms)  # as most expressions begin, of which a program has a million
            return self
        for variable, coefficient in other.terms.items():
            terms[variable] = terms.get(variable, 0.0) + factor * coefficient
        return self


def total(*parts: tuple[float, Linear]) -> Linear:
    """The sum of factor × expression."""
    result = Linear()
    for factor, part in parts:
        result.add(part, factor)
    return result


ZERO, ONE = Linear(), Linear(1.0)


def bytes_of(expression: Linear, solution: Floats) -> float:
    """What an expression comes to at a point."""
    return expression.constant + sum(c * float(solution[v]) for v, c in expression.terms.items())


def sparse(
    cost: list[float], offset: float, integer: list[bool], rows: list[tuple[dict[int, float], float]]
) -> SparseModel:
    """Rows given as (coefficients, lower bound) in arrays."""
    counts = np.fromiter((len(terms) for terms, _ in rows), dtype=np.int64, count=len(rows))
    size = int(counts.sum())
    return SparseModel(
        cost=np.array(cost),
        offset=offset,
        integer=np.array(integer, dtype=np.bool_),
        least=np.zeros(len(cost)),
        most=np.ones(len(cost)),
        starts=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts))),
        columns=np.fromiter((v for terms, _ in rows for v in terms), dtype=np.int64, count=size),
        coefficients=np.fromiter((c for terms, _ in rows for c in terms.values()), dtype=np.float64, count=size),
        lower=np.array([lower for _, lower in rows]),
    )
