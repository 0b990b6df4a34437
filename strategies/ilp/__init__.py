"""The optimum of "keep, or recompute once", with a proven gap: `search` asks, the other modules answer."""

from strategies.ilp.search import Ilp

__all__ = ["Ilp"]
