"""A workload made, captured and measured by the one pipeline: how every experiment that runs a step begins."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from bench.show.terminal import console
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from profiler.estimating.roofline import with_roofline_times
from profiler.measuring.memory import guarded, usable_bytes
from profiler.tracing.whole_step import TracedStep
from rewriter.pipeline import Liberties, ReadyStep, prepare


def _say_nothing(_: str) -> None: ...


def prepared(
    spec: WorkloadSpec,
    budgets: Sequence[str] = (),
    *,
    tell: Callable[[str], None] = _say_nothing,
    show_progress: bool = False,
) -> ReadyStep:
    """The captured and measured step, also of one that does not fit in memory as it is.

    `budgets` are those that plans will be asked for; without any, all the memory there is may be used. OutOfMemory
    where it cannot even be made, OverBudget where it cannot be measured under a plan either.
    """
    workload = guarded(f"making {spec.title}", spec.make)
    liberties = Liberties(free_gradients=spec.free_gradients, early_updates=spec.early_updates)
    limits: list[str | int] = [*budgets] or [usable_bytes(workload.device)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the step as it is needs", category=UserWarning)  # told below
        ready = guarded(
            f"measuring {spec.title}",
            lambda: prepare(
                workload, limits, name=spec.title, liberties=liberties, show_progress=show_progress, tell=tell
            ),
        )
    if not ready.as_it_is:
        console.print(f"{spec.title} does not fit on this machine as it is: its ops were measured under a plan")
    return ready


def measured_graph(spec: WorkloadSpec) -> Graph:
    """The captured graph of a step with the times measured here."""
    return prepared(spec, tell=console.print, show_progress=True).graph


def roofline_graph(spec: WorkloadSpec) -> Graph:
    """The captured graph of a step with the fixed roofline's times; OutOfMemory where it cannot even be made."""
    return guarded(f"capturing {spec.title}", lambda: with_roofline_times(captured(spec)))


def captured(spec: WorkloadSpec) -> TracedStep:
    """The captured step, not measured."""
    return spec.capture(spec.make())
