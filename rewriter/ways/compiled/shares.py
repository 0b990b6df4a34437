"""What one graph runs of a schedule that was made for several as one."""

from __future__ import annotations

from dataclasses import replace

from planner.schedule import Free, Run, Schedule, Step
from profiler.tracing.joint import OUTSIDE_NAME
from rewriter.ways.compiled.nesting import Nested


def share(nested: Nested, schedule: Schedule, call: int) -> Schedule:
    """The steps of one part of a nested graph, in its own ids."""
    return Schedule(tuple(_Share(nested, call).steps(schedule)))


class _Share:
    """One part's steps of a nested schedule."""

    def __init__(self, nested: Nested, call: int) -> None:
        self.graph = nested.parts[call].graph
        self.ops = nested.ops[call]
        self.locals: dict[int, list[int]] = {}
        for local, storage in nested.storages[call].items():
            if self.graph.maker[local] is not None or self._is_state(local):
                self.locals.setdefault(storage, []).append(local)
        self.resident = set[int]()
        self.end = nested.ends[call]
        (self.turn,) = [op.id for op in self.graph.ops if op.target == OUTSIDE_NAME]

    def _is_state(self, storage: int) -> bool:
        return any(op.rng_state == storage for op in self.graph.ops)

    def steps(self, schedule: Schedule) -> list[Step]:
        found = list[Step]()
        for step in schedule.steps:
            if isinstance(step, Run) and step.op in self.ops:
                into = None if step.into is None else self.locals[step.into][0]
                found.append(self._made(replace(step, op=self.ops[step.op], into=into)))
            elif isinstance(step, Run) and step.op == self.end:
                found.append(self._made(Run(self.turn)))
            elif isinstance(step, Free):
                for storage in self.locals.get(step.storage, ()):
                    if storage in self.resident:
                        self.resident.remove(storage)
                        found.append(Free(storage))
        return found

    def _made(self, run: Run) -> Run:
        if run.into is not None:
            self.resident.discard(run.into)
        self.resident |= set(self.graph.makes[run.op])
        state = self.graph.ops[run.op].rng_state
        if state is not None:
            self.resident.add(state)
        return run
