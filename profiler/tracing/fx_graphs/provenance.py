"""Where each node of a trace comes from: phase and round of the step, module path, the user's line."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

from planner.ir import Phase
from profiler.errors import is_machinery
from profiler.tracing.fake_tensors.patches import patched

_MODULE_CALL = nn.Module._call_impl.__code__

# Keys of `node.meta`: where a node comes from, and which parameter's gradient it holds.
META = "origin"
GRADIENT_OF = "gradient_of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which part of the step made a node, and which line of the user's."""

    phase: Phase
    round: int
    module_path: str = ""
    source_line: str = ""


class Stamper:
    """Marks every node that a tracer creates with its Origin, as the step moves from phase to phase.

    What stands between a backward and the next thing is decided by that next thing: another backward makes
    it that round's forward; `optimizer.step` or the end of the step makes it part of the optimizer (clipping).
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._by_sequence: dict[int, Origin] = {}
        self._undecided: list[fx.Node] = []
        self._phase: Phase | None = Phase.FORWARD
        self._round = 0
        self._depth = 0
        self._lines: dict[tuple[str, int], str] = {}

    @contextmanager
    def attached(self, tracer: Any) -> Iterator[None]:
        """Stamp what `tracer` creates, as long as the context lasts."""
        create = tracer.create_node

        def create_and_stamp(*args: Any, **kwargs: Any) -> fx.Node:
            node: fx.Node = create(*args, **kwargs)
            self._stamp(node)
            return node

        with patched([(tracer, "create_node", create_and_stamp)]):
            yield
        self._settle(Phase.OPTIMIZER)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The ops made inside are a backward's; nested calls are the same backward."""
        if self._depth == 0:
            self._settle(Phase.FORWARD)
            self._phase = Phase.BACKWARD
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._phase = None
                self._round += 1

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """The ops made inside are the optimizer's."""
        self._settle(Phase.OPTIMIZER)
        self._phase = Phase.OPTIMIZER
        try:
            yield
        finally:
            self._phase = None

    def line(self) -> str:
        """The line of the user's or a library's that is running."""
        return self._walk(sys._getframe(1))[1]

    def _settle(self, phase: Phase) -> None:
        last_round = max(self._round - 1, 0) if phase is Phase.OPTIMIZER else self._round
        for node in self._undecided:
            node.meta[META] = replace(node.meta[META], phase=phase, round=last_round)
        self._undecided.clear()

    def _stamp(self, node: fx.Node) -> None:
        in_backward = self._phase is Phase.BACKWARD
        path, line = self._backward_place() if in_backward else self._forward_place()
        phase = self._phase or Phase.OPTIMIZER
        number = max(self._round - 1, 0) if phase is Phase.OPTIMIZER else self._round
        node.meta[META] = Origin(phase=phase, round=number, module_path=path, source_line=line)
        if self._phase is None:
            self._undecided.append(node)

    def _forward_place(self) -> tuple[str, str]:
        place = self._walk(sys._getframe(3))
        # The autograd node of the op that is being recorded was numbered just before: its backward finds it.
        sequence = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        self._by_sequence.setdefault(
            sequence, Origin(phase=Phase.FORWARD, round=0, module_path=place[0], source_line=place[1])
        )
        return place

    def _backward_place(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        origin = None if node is None else self._by_sequence.get(node._sequence_nr())
        return ("", "") if origin is None else (origin.module_path, origin.source_line)

    def _walk(self, frame: FrameType | None) -> tuple[str, str]:
        line, path = "", None
        while frame is not None and not (line and path is not None):
            if not line and not is_machinery(frame.f_code.co_filename):
                line = self._line(frame.f_code.co_filename, frame.f_lineno)
            if path is None and frame.f_code is _MODULE_CALL:
                path = self._paths.get(id(frame.f_locals.get("self")))
            frame = frame.f_back
        return path or "", line

    def _line(self, filename: str, lineno: int) -> str:
        key = (filename, lineno)
        if key not in self._lines:
            code = linecache.getline(filename, lineno).strip()
            self._lines[key] = f"{Path(filename).name}:{lineno} {code}".rstrip()
        return self._lines[key]


def origin_of(node: fx.Node) -> Origin:
    """The origin stamped on a node while it was traced."""
    origin: Origin = node.meta[META]
    return origin
