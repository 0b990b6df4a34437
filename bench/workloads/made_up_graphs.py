"""Made-up graphs by name: shapes of steps to plan on without a model. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from planner import synthetic
from planner.errors import PlannerError
from planner.ir import Graph

LAYERED_NODES = (100, 300, 1000)

SYNTHETIC: dict[str, Callable[[], Graph]] = {
    "chain": lambda: synthetic.chain(40),
    "tower": lambda: synthetic.residual_tower(30),
    "unet": lambda: synthetic.unet(5),
    "transformer": lambda: synthetic.transformer(12),
    "accumulation": lambda: synthetic.accumulation(2, 20),
    "resnet-like": synthetic.resnet_like,
    **{f"layered-{n}": partial(synthetic.layered, n) for n in LAYERED_NODES},
}


def made_up(names: Sequence[str]) -> list[Graph]:
    """The graphs of these names; PlannerError says which there are."""
    if unknown := [name for name in names if name not in SYNTHETIC]:
        raise PlannerError(f"unknown graph {unknown[0]!r}: there are {', '.join(SYNTHETIC)}")
    return [SYNTHETIC[name]() for name in names]
