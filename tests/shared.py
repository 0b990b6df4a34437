"""Steps that many tests look at: made, captured and measured once in a process, and left as they were found."""

from __future__ import annotations

import operator
from functools import cache, cached_property
from typing import Any

from planner.ir import Graph
from planner.schedule import Schedule
from planner.simulator import simulate
from profiler.measuring.op_times import measure
from profiler.measuring.restoring import Touched
from profiler.tracing.whole_step import TraceAgain, TracedStep, capture, trace_again
from profiler.workload import Workload
from rewriter.replay import apply
from tests.side_by_side import Make, assert_same, eager, history, measured_peak, seeded

STEPS = 3  # the first makes state, the second reads it, the third finds nothing new


class Case:
    """A workload from its seed; its step captured, the same measured, and a few steps of it run eagerly."""

    def __init__(self, make: Make) -> None:
        self.workload = seeded(make)
        self.train_step, self.model, self.optimizer, self.batch = self.workload
        self._captures: dict[tuple[tuple[str, Any], ...], TracedStep] = {}

    def capture(self, **options: Any) -> TracedStep:
        """The capture with those options, made when it is first asked for."""
        chosen = tuple(sorted((key, value) for key, value in options.items() if value))
        if chosen not in self._captures:
            self._captures[chosen] = capture(*self.workload, **dict(chosen))
        return self._captures[chosen]

    @property
    def captured(self) -> TracedStep:
        return self.capture()

    @cache  # noqa: B019 - cases live as long as the process
    def second_trace(self, **options: Any) -> TraceAgain:
        return trace_again(Workload(*self.workload), **options)

    @cached_property
    def traced(self) -> TracedStep:
        return measure(self.captured, self.batch, show_progress=False).traced

    @property
    def graph(self) -> Graph:
        return self.traced.graph

    @cached_property
    def expected(self) -> list[Any]:
        with self.kept():
            return eager(self.workload, steps=STEPS)

    def kept(self) -> Any:
        """Whatever is done inside, the next test finds everything as it was."""
        return Touched.by(self.captured, self.batch).kept()

    def assert_exact(self, schedule: Schedule, *, steps: int = STEPS) -> None:
        """The first steps of `schedule`, from where the eager ones started."""
        module, expected = apply(self.traced, schedule), self.expected[:steps]
        with self.kept():
            actual = history(lambda b: self.traced.convention.call(module, b), self.workload, steps=steps)
        assert_same(expected, actual)

    def predicted(self, schedule: Schedule) -> int:
        return simulate(self.graph, schedule).above_start_bytes

    def peak(self, schedule: Schedule) -> int:
        module = apply(self.traced, schedule)
        return measured_peak(lambda: self.traced.convention.call(module, self.batch), self.workload)


_cases: dict[Make, Case] = {}


def case_of(make: Make) -> Case:
    """The one case of that function, whichever test asks for it."""
    if make not in _cases:
        _cases[make] = Case(make)
    return _cases[make]


def remembered_capture(*workload: Any, **options: Any) -> TracedStep:
    """`capture`, but that of a case's own workload is not made again while nothing of it changed: that two captures of
    one step are equal is a test of its own."""
    case = _case_with(workload)
    if case is None or case.capture(**options).convention.check(case.batch):
        return capture(*workload, **options)
    return case.capture(**options)


def remembered_again(workload: Workload, **options: Any) -> TraceAgain:
    """`trace_again`, but a case's second trace is not made a third time."""
    case = _case_with(workload)
    if case is None or case.captured.convention.check(case.batch):
        return trace_again(workload, **options)
    return case.second_trace(**options)


def _case_with(workload: tuple[Any, ...]) -> Case | None:
    found = (case for case in _cases.values() if all(map(operator.is_, case.workload, workload)))
    return next(found, None)
