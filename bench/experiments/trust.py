"""What it costs to be sure: each stage of preparing a step that computes no plan, and the check before every call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.show.tables import print_table
from bench.show.terminal import say
from bench.workloads.spec import WorkloadSpec
from profiler.measuring.op_times import Measured
from profiler.tracing.whole_step import trace_again
from rewriter.pipeline import ReadyStep, check_path

T = TypeVar("T")

CHECKS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustRow:
    """The costs of one model, in milliseconds; of the check in microseconds."""

    title: str
    step_ms: float  # one eager step
    capture_ms: float
    second_trace_ms: float
    audit_ms: float  # an eager step with its ops noted, and everything put back
    proof_ms: float  # a step of each version, observed and put back
    check_us: float  # of the guards, before every call: the median
    fastest_check_us: float

    @property
    def added_ms(self) -> float:
        """What preparing a step takes longer for the sake of being sure."""
        return self.second_trace_ms + self.audit_ms + self.proof_ms

    @property
    def allowed_ms(self) -> float:
        """What it may: one capture and three steps."""
        return self.capture_ms + 3 * self.step_ms

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        shown = (self.step_ms, self.capture_ms, self.second_trace_ms, self.audit_ms, self.proof_ms)
        return (
            self.title,
            *(f"{ms:,.0f}" for ms in (*shown, self.added_ms, self.allowed_ms)),
            f"{self.check_us:,.0f} ({self.fastest_check_us:,.0f} at best)",
        )


COLUMNS = (
    "model", "eager step", "capture", "second trace", "audit", "proof", "the last three", "capture + 3 steps",
    "guards at each call, µs",
)  # fmt: skip


def run_trust(specs: Sequence[WorkloadSpec]) -> list[TrustRow]:
    """Time every stage of every model, and print them beside an eager step."""
    rows = []
    for spec in specs:
        say(f"timing what trust costs on {spec.title}")
        rows.append(trust_row(spec))
    print_table(
        "What trust costs",
        COLUMNS,
        [row.cells for row in rows],
        caption="milliseconds on the wall, once, while the step is prepared; the last column in microseconds",
    )
    return rows


def trust_row(spec: WorkloadSpec) -> TrustRow:
    """The costs of one model, each stage run as `checkpoint` runs it."""
    workload = spec.make()
    workload.run_once()
    _, step_ms = _timed(workload.run_once)
    traced, capture_ms = _timed(lambda: spec.capture(workload))
    _, second_ms = _timed(lambda: trace_again(workload, optimizer_outside=False))
    _, audit_ms = _timed(lambda: check_path(workload, traced))
    ready = ReadyStep(workload=workload, measured=Measured(traced=traced, stats=()), as_it_is=True)
    _, proof_ms = _timed(lambda: _proven(ready))
    checks = [_timed(lambda: traced.convention.check(workload.batch))[1] for _ in range(CHECKS)]
    return TrustRow(
        title=spec.title,
        step_ms=step_ms,
        capture_ms=capture_ms,
        second_trace_ms=second_ms,
        audit_ms=audit_ms,
        proof_ms=proof_ms,
        check_us=1e3 * statistics.median(checks),
        fastest_check_us=1e3 * min(checks),
    )


def _proven(ready: ReadyStep) -> None:
    ready.eager_seen(ready.workload.batch, steps=1)
    ready.unplanned.seen(ready.workload.batch, steps=1)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    result = work()
    return result, 1e3 * (time.perf_counter() - started)
