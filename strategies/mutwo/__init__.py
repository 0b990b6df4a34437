"""The greedy of μ-TWO (MLSys 2023): `greedy` and `swapping` with its holes closed, `paper` to the letter."""

from strategies.mutwo.greedy import MuTwo

__all__ = ["MuTwo"]
