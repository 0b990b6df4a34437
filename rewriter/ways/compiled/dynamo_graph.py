"""One graph of Dynamo's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from profiler.tracing.fx_graphs.layouts import Layout
from rewriter.ways.compiled import seams
from rewriter.ways.compiled.own_joint import OwnJoint, captured


class DynamoGraph:
    """One graph of Dynamo's, and its joint graphs as they are asked for."""

    def __init__(self, index: int, module: fx.GraphModule, run: Callable[[DynamoGraph, Sequence[Any]], Any]) -> None:
        self.index = index
        self.module = module
        self.stand_ins = seams.stand_ins(module)
        self.symbols = tuple((str(s), i) for i, s in enumerate(self.stand_ins) if seams.is_symbol(s))
        self._run = run
        self._joints: dict[tuple[Any, ...], OwnJoint] = {}

    def __call__(self, *args: Any) -> Any:
        return self._run(self, args)

    @property
    def is_trainable(self) -> bool:
        """Whether anything that it is given may get a gradient from what it returns."""
        given = any(isinstance(s, Tensor) and s.requires_grad for s in self.stand_ins)
        return given and any(isinstance(r, Tensor) and r.requires_grad for r in seams.returned(self.module))

    @property
    def device(self) -> torch.device:
        return next((s.device for s in self.stand_ins if isinstance(s, Tensor)), torch.device("cpu"))

    def numbers(self, args: Sequence[Any]) -> dict[str, int]:
        """The symbols' values in a call."""
        return {name: args[i] for name, i in self.symbols}

    def joint(
        self,
        used: frozenset[int] | None,
        layouts: Mapping[int, Layout] | None = None,
    ) -> OwnJoint:
        """Its forward and backward, for these outputs."""
        key = used, frozenset((layouts or {}).items())
        if key not in self._joints:
            self._joints[key] = captured(
                self.module, self.stand_ins, name=f"graph {self.index}", used=used, layouts=layouts
            )
        return self._joints[key]
