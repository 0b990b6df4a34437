"""Whether a step fits, asked before it runs: on the CPU running out of memory is mostly a kill, not an error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.ir import Graph, Role
from planner.simulator import unplanned
from planner.units import human_bytes
from profiler.measuring.memory import available_bytes, usable_bytes
from profiler.tracing.whole_step import TracedStep
from profiler.workload import device_of

_MAIN = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a captured step will still allocate: at its peak, and when it is done and looked at.

    The step's own bytes lie on its device; copies lie in main memory, wherever the model is.
    """

    peak_bytes: int
    peak_copies_bytes: int
    done_bytes: int
    done_copies_bytes: int


def need_of(traced: TracedStep, *, proven_steps: int = 0, added_bytes: int | None = None) -> Need:
    """The need of measuring a step unplanned and, with `proven_steps`, of comparing a planned one with eager over them.

    `added_bytes` is what the step adds to memory, where that is not what it adds unplanned. `state_kept` copies all
    that a step writes to, as far as it is there. `observe` copies the gradients after each step, at the end parameters,
    buffers and optimizer state; eager's copies are held while a planned step, which peaks no higher, makes its own.
    """
    graph, made = traced.graph, {traced.graph.values[v].storage for v in traced.gradients.values()}
    gradients = sum(graph.storages[s].nbytes for s in made)
    state = graph.start_bytes - _start_bytes(graph, Role.INPUT)
    lazy = 0 if traced.convention.optimizer.state else _start_bytes(graph, Role.OPT_STATE)  # made by the first step
    kept, seen = state - lazy, state + proven_steps * gradients if proven_steps else 0
    return Need(
        peak_bytes=lazy + (unplanned(graph).above_start_bytes if added_bytes is None else added_bytes),
        peak_copies_bytes=kept + seen + max(0, proven_steps - 1) * gradients,
        done_bytes=lazy + gradients,
        done_copies_bytes=kept + 2 * seen,
    )


def _start_bytes(graph: Graph, role: Role) -> int:
    storages = {value.storage for value in graph.values if value.producer is None}
    return sum(graph.storages[s].nbytes for s in storages if graph.storages[s].role is role)


def lack_of(traced: TracedStep, *, proven_steps: int = 0, added_bytes: int | None = None) -> str:
    """Why a step that was just captured does not fit beside its copies, with the numbers; "" where it does."""
    need = need_of(traced, proven_steps=proven_steps, added_bytes=added_bytes)
    return lack(need, device_of(traced.convention.model))


def lack(need: Need, device: torch.device) -> str:
    """Why so much does not fit on a device and in main memory, with the numbers; "" where it does."""
    copies = max(need.peak_copies_bytes, need.done_copies_bytes)
    demands = [(device, max(need.peak_bytes, need.done_bytes)), (_MAIN, copies)]
    if device.type == _MAIN.type:
        both = max(need.peak_bytes + need.peak_copies_bytes, need.done_bytes + need.done_copies_bytes)
        demands = [(_MAIN, both)]
    for place, nbytes in demands:
        usable = usable_bytes(place)
        if nbytes > usable:
            return (
                f"it needs {human_bytes(nbytes)} more on {place}, copies included, and "
                f"{human_bytes(usable)} of the {human_bytes(available_bytes(place))} available may be taken"
            )
    return ""
