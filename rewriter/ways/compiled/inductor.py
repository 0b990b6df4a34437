"""Dynamo's graphs of one model on inductor's kernels: each plan decides what a forward saves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PlannerError
from planner.ir import Graph
from planner.solve import Solution
from rewriter.ways.common import ModelSettings
from rewriter.ways.compiled import seams
from rewriter.ways.compiled.limits import elsewhere_bytes, room_for, solved
from rewriter.ways.compiled.partitioning import Partitioned, partitioned

log = logging.getLogger("recompute_planner")


class InductorSession:
    """The graphs of one model, compiled by inductor; each plan decides what its forward saves."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.options: Mapping[str, Any] | None = None  # of `torch.compile`, where that asked for it
        self.planned: list[Partitioned] = []
        self.unplanned = 0

    def compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Inductor's code for one graph."""
        device = next((i.device for i in inputs if isinstance(i, Tensor)), torch.device("cpu"))

        def partition(joint: fx.GraphModule, num_fwd_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
            with seams.outside_of_tracing():
                name = f"graph {len(self.planned)}"
                found = partitioned(joint, num_fwd_outputs, name=name, solve=lambda graph: self._solved(graph, device))
            self.planned.append(found)
            log.info("%s: %s; %d bytes saved", name, found.solution, found.saved_bytes)
            return found.forward, found.backward

        run = seams.compiled_by_inductor(module, inputs, partition=partition, without_plan=self._note_unplanned)
        return _Compiled(run, self)

    def _note_unplanned(self) -> None:
        self.unplanned += 1

    def _solved(self, graph: Graph, device: torch.device) -> Solution:
        # What the forwards of the other graphs save is there when this one runs, and nobody sees it.
        elsewhere = elsewhere_bytes(self.settings, device, ())
        if elsewhere:
            elsewhere = max(0, elsewhere - graph.start_bytes) + sum(one.saved_bytes for one in self.planned)
        return solved(graph, self.settings, room_for(graph, self.settings, device, elsewhere=elsewhere))

    @property
    def solution(self) -> Solution:
        """The plan of the graph that takes most."""
        if not self.planned:
            raise PlannerError("nothing is planned yet: the first training step does that")
        return max((one.solution for one in self.planned), key=lambda s: s.timeline.peak_bytes if s.timeline else 0)


@dataclass(frozen=True, eq=False)
class _Compiled:
    """What runs a graph; its session is there as long as it is."""

    run: Callable[..., Any]
    session: InductorSession

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)
