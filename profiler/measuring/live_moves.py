"""Moves to the host while a step runs op by op on live tensors."""

from __future__ import annotations

from typing import Any, assert_never

from torch import fx

from planner.errors import LinkError
from planner.schedule import Launch, Wait, Work
from profiler.measuring.hosts import Host, Move
from profiler.tracing.whole_step import TracedStep


class LiveMoves:
    """What is on its way in a run whose tensors are in `live`, by captured node."""

    def __init__(self, traced: TracedStep, host: Host | None) -> None:
        self._traced, self._host = traced, host
        self._moves: dict[int, Move] = {}
        self._went: dict[int, list[fx.Node]] = {}

    def take(self, step: Launch | Wait, live: dict[fx.Node, Any]) -> None:
        """Begin a copy, or wait for one; freeing is a step of its own."""
        match step:
            case Launch():
                self._launch(step, live)
            case Wait():
                self._wait(step, live)
            case _:
                assert_never(step)

    def _launch(self, step: Launch, live: dict[fx.Node, Any]) -> None:
        match step.lane.work:
            case Work.COPY_OUT:
                self._moves[step.storage] = Move(self._host_here(), live[self._here(step.storage, live)[0]])
            case Work.COPY_IN:
                self._moves[step.storage].fetch()
            case Work.COLLECTIVE:
                pass  # the op that has just run
            case _:
                assert_never(step.lane.work)

    def _wait(self, step: Wait, live: dict[fx.Node, Any]) -> None:
        match step.lane.work:
            case Work.COPY_OUT:
                went = self._went[step.storage] = self._here(step.storage, live)
                self._moves[step.storage].away([live[node] for node in went])
            case Work.COPY_IN:
                tensors = self._moves.pop(step.storage).back()
                live.update(zip(self._went.pop(step.storage), tensors, strict=True))
            case Work.COLLECTIVE:
                pass  # the op that runs next
            case _:
                assert_never(step.lane.work)

    def _host_here(self) -> Host:
        if self._host is None:
            raise LinkError("a step is measured under a plan that moves tensors to the host, and there is none here")
        return self._host

    def _here(self, storage: int, live: dict[fx.Node, Any]) -> list[fx.Node]:
        nodes = (self._traced.value_nodes[v] for v in self._traced.graph.values_in[storage])
        return [node for node in dict.fromkeys(nodes) if node in live]
