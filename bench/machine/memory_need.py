"""Whether a step fits, asked before it runs: on the CPU running out of memory is mostly a kill, not an error."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from planner.ir import Graph, Role
from planner.simulator import unplanned
from planner.units import human_bytes
from profiler.measuring.memory import OutOfMemory, available_bytes
from profiler.tracing.whole_step import TracedStep

# A process needs more than its tensors, and workspaces are not known before they are measured: this share of what is
# available stays out of reach.
HEADROOM = 0.15

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


def need_of(traced: TracedStep, *, proven_steps: int = 0) -> Need:
    """The need of measuring a step unplanned and, with `proven_steps`, of comparing a planned one with eager over them.

    `state_kept` copies all that a step writes to, as far as it is there. `observe` copies the gradients after each
    step, and at the end parameters, buffers and optimizer state; eager's copies are held while a planned step, which
    peaks no higher than the unplanned one, makes its own.
    """
    graph, made = traced.graph, {traced.graph.values[v].storage for v in traced.gradients.values()}
    gradients = sum(graph.storages[s].nbytes for s in made)
    state = graph.start_bytes - _start_bytes(graph, Role.INPUT)
    lazy = 0 if traced.convention.optimizer.state else _start_bytes(graph, Role.OPT_STATE)  # made by the first step
    kept, seen = state - lazy, state + proven_steps * gradients if proven_steps else 0
    return Need(
        peak_bytes=lazy + unplanned(graph).above_start_bytes,
        peak_copies_bytes=kept + seen + max(0, proven_steps - 1) * gradients,
        done_bytes=lazy + gradients,
        done_copies_bytes=kept + 2 * seen,
    )


def _start_bytes(graph: Graph, role: Role) -> int:
    storages = {value.storage for value in graph.values if value.producer is None}
    return sum(graph.storages[s].nbytes for s in storages if graph.storages[s].role is role)


def lack_of(traced: TracedStep, *, proven_steps: int = 0) -> str:
    """Why a step that was just captured does not fit beside its copies, with the numbers; "" where it does."""
    device = next((p.device for p in traced.convention.model.parameters()), _MAIN)
    return lack(need_of(traced, proven_steps=proven_steps), device)


def lack(need: Need, device: torch.device) -> str:
    """Why so much does not fit on a device and in main memory, with the numbers; "" where it does."""
    copies = max(need.peak_copies_bytes, need.done_copies_bytes)
    demands = [(device, max(need.peak_bytes, need.done_bytes)), (_MAIN, copies)]
    if device.type == _MAIN.type:
        both = max(need.peak_bytes + need.peak_copies_bytes, need.done_bytes + need.done_copies_bytes)
        demands = [(_MAIN, both)]
    for place, nbytes in demands:
        there = available_bytes(place)
        usable = int((1 - HEADROOM) * there)
        if nbytes > usable:
            return (
                f"it needs {human_bytes(nbytes)} more on {place}, copies included, and "
                f"{human_bytes(usable)} of the {human_bytes(there)} available may be taken"
            )
    return ""


def check_fits(what: str, traced: TracedStep, *, proven_steps: int = 0) -> None:
    """OutOfMemory, with the numbers and the way on, where a step that was just captured cannot be run here."""
    if why := lack_of(traced, proven_steps=proven_steps):
        raise OutOfMemory(
            f"{what} does not fit on this machine: {why}. A smaller --batch may; --batches predicts what does not fit; "
            "`python -m bench fit`, `plans` and `--graph` plan without running"
        )
