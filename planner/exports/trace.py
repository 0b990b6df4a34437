"""A step on the lines of a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The form is the JSON of the Trace Event Format: complete events (`X`) on named threads, and counters (`C`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_never

from planner.files import write_whole
from planner.ir import Graph, Phase
from planner.schedule import Schedule, unplanned_schedule
from planner.solve import Solution
from planner.walk import Event, Freed, Launched, Ran, Waited, walk

Record = dict[str, Any]

# Readers count whole ns: of a bar that begins one ns before the last on its line has ended, Perfetto shows nothing. In
# eighths of a µs every time is a whole number of ns, also as a float, and what ends where the next begins stays so.
GRID_A_US = 8

# The lines of a step, from above. Lanes of asynchronous work come after them.
THREADS = (*(phase.value for phase in Phase), "recomputation", "waiting")


def write_trace(path: str | Path, solution: Solution) -> None:
    """The planned step and the step as it is, as two processes of one file; FileFormatError if it cannot be."""
    write_whole(path, json.dumps(trace(solution), separators=(",", ":")) + "\n")


def trace(solution: Solution) -> Record:
    """What `write_trace` writes. Times are the graph's own, in µs from the start of the step."""
    assert solution.schedule is not None
    graph, problem = solution.problem.graph, solution.problem
    as_it_is = unplanned_schedule(graph, in_place=problem.in_place)
    events = [
        *_process(graph, solution.schedule, number=1, name=f"{graph.name}, planned by {solution.strategy}"),
        *_process(graph, as_it_is, number=2, name=f"{graph.name} as it is"),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"times": str(graph.timing)}}


def _process(graph: Graph, schedule: Schedule, *, number: int, name: str) -> Iterator[Record]:
    lines = list(THREADS)
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}}
    for event in walk(graph, schedule):
        yield from _line(graph, event, number, lines)
        counted = {"bytes": event.during_bytes}
        yield {
            "ph": "C",
            "pid": number,
            "tid": 0,
            "name": "live bytes",
            "ts": _on_grid(event.start_us),
            "args": counted,
        }
    for thread, line in enumerate(lines):
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": line}}
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _line(graph: Graph, event: Event, number: int, lines: list[str]) -> Iterator[Record]:
    """The event as a bar on its line; what takes no time has none."""
    names = graph.storage_names
    match event:
        case Ran():
            thread = "recomputation" if event.again else event.op.phase.value
            details = {
                "op": event.op.target,
                "module": event.op.module_path,
                "source": event.op.source_line,
                "makes": [names[s] for s in event.made],
                "over": [names[s] for s in event.freed],
                "bytes": event.during_bytes,
            }
            yield _bar(number, lines, thread, event.op.name, event.start_us, event.took_us, details)
        case Launched():
            thread, took_us = _lane(event.step), event.done_us - event.busy_us
            details = {"bytes": graph.storages[event.step.storage].nbytes, "launched_us": event.start_us}
            yield _bar(number, lines, thread, names[event.step.storage], event.busy_us, took_us, details)
        case Waited():
            if event.stall_us > 0:
                what = f"for {_lane(event.step)} of {names[event.step.storage]}"
                yield _bar(number, lines, "waiting", what, event.start_us, event.stall_us, {})
        case Freed():
            pass
        case _:
            assert_never(event)


def _lane(step: Any) -> str:
    return f"{step.lane.work.value} {step.lane.group}".rstrip()


def _bar(number: int, lines: list[str], thread: str, name: str, ts: float, dur: float, args: Record) -> Record:
    if thread not in lines:
        lines.append(thread)
    category = thread.split()[0] if lines.index(thread) >= len(THREADS) else thread  # of a lane, what it does
    place = {"pid": number, "tid": lines.index(thread)}
    begin = _on_grid(ts)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        **place,
        "ts": begin,
        "dur": _on_grid(ts + dur) - begin,
        "args": args,
    }


def _on_grid(time_us: float) -> float:
    return round(time_us * GRID_A_US) / GRID_A_US
