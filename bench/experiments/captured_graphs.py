"""The captured graph of a step, with times measured here or of a fixed roofline."""

from __future__ import annotations

from bench.machine.memory_need import check_fits
from bench.show.terminal import say, stage
from bench.workloads.spec import WorkloadSpec
from planner.ir import Graph
from profiler.estimating.roofline import with_roofline_times
from profiler.measuring.memory import guarded
from profiler.measuring.op_times import measure


def roofline_graph(workload: WorkloadSpec) -> Graph:
    """The captured graph of a step with the fixed roofline's times; OutOfMemory where it cannot even be made."""
    return guarded(f"capturing {workload.title}", lambda: with_roofline_times(workload.capture(workload.make())))


def measured_graph(workload: WorkloadSpec) -> Graph:
    """The captured graph of a step with the times measured here; OutOfMemory where it does not fit."""
    return guarded(f"measuring {workload.title}", lambda: _measured(workload))


def _measured(workload: WorkloadSpec) -> Graph:
    with stage(f"{workload.title}: capturing the step"):
        made = workload.make()
        traced = workload.capture(made)
    check_fits(workload.title, traced)
    say("measuring every op")
    return measure(traced, made[3]).graph
