"""What training on several processes adds to a trace, whichever way they share the work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import fx, nn

from profiler.collectives import COMMUNICATION
from profiler.errors import CaptureError
from profiler.tracing.eager_ways.reads import Assumption
from profiler.tracing.guards import Guard

Flag = tuple[nn.Module, str, Any]  # an attribute of a module, and its value


class Parallel(Protocol):
    """What training on several processes adds to a trace."""

    def inside(self) -> Any:
        """The context in which the step is traced."""
        ...

    def backward(self, accumulates: bool) -> Any:
        """The context of one backward pass."""
        ...

    def finish(self) -> None:
        """The step has ended; CaptureError where it left something open."""
        ...

    def refuse_reads(self, late: Sequence[Assumption]) -> None:
        """CaptureError for values that the step reads half-way, where one rank could go another way than the others."""
        ...

    @property
    def guards(self) -> tuple[Guard, ...]: ...

    @property
    def flags_after(self) -> tuple[Flag, ...]: ...


class OneProcess:
    """A step that communicates with nobody."""

    guards: tuple[Guard, ...] = ()
    flags_after: tuple[Flag, ...] = ()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Nothing is added."""
        yield

    @contextmanager
    def backward(self, accumulates: bool) -> Iterator[None]:
        """Nothing is added."""
        yield

    def finish(self) -> None:
        """Nothing is open."""

    def refuse_reads(self, late: Sequence[Assumption]) -> None:
        """Every read is welcome."""


class AfterBackwards:
    """What follows the outermost of backwards that run inside of each other, once."""

    _depth = 0

    @contextmanager
    def backward(self, accumulates: bool) -> Iterator[None]:
        """Inside, a backward runs."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0:
            self.after_backward()

    def after_backward(self) -> None:
        """The outermost one has ended, without an error."""


class Communicating(AfterBackwards, OneProcess):
    """A step of several ranks."""

    def refuse_reads(self, late: Sequence[Assumption]) -> None:
        """None can be taken back once other ranks have gone on."""
        refuse_late_reads(late)


@contextmanager
def as_communication(graph: fx.Graph) -> Iterator[None]:
    """Marks the nodes made inside: eager has them below the dispatcher, or in another form."""
    node: fx.Node = next(reversed(graph.nodes))
    yield
    while node.next.op != "root":
        node = node.next
        node.meta[COMMUNICATION] = True


def refuse_late_reads(late: Sequence[Assumption]) -> None:
    """CaptureError for a read that is checked half-way through the step: one rank would turn round alone."""
    if late:
        raise CaptureError(
            f"`{late[0].line}` reads a value that the model computes or draws, and the step goes another way by it: on "
            "several processes one rank would go alone. Keep it a tensor, or read it after the step"
        )
