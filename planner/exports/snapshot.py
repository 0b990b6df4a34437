"""A memory snapshot of a step that has not run, for PyTorch's own viewer.

The form is that of `torch.cuda.memory._snapshot()`: what `python -m torch.cuda._memory_viz` and the page at
pytorch.org/memory_viz read. Addresses come from a simulation of the caching allocator.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner.allocator import CachingAllocator, Piece
from planner.blocks import Block, blocks, requests
from planner.files import write_whole
from planner.ir import Graph, Op
from planner.schedule import Run, RunKind, Schedule, unplanned_schedule
from planner.solve import Solution
from planner.walk import walk

FIRST_ADDRESS = 0x7F00_0000_0000  # as CUDA's are, and below where the viewer's numbers stop being exact
PROTOCOL = 4  # the newest that the page reads

Record = dict[str, Any]


def write_snapshot(path: str | Path, solution: Solution) -> None:
    """The planned step as device 0 and the step as it is as device 1, in one file; FileFormatError if it cannot be."""
    write_whole(path, pickle.dumps(snapshot(solution), protocol=PROTOCOL))


def snapshot(solution: Solution) -> Record:
    """What `write_snapshot` writes: `segments` as the steps leave them, `device_traces` of all that they ask for."""
    assert solution.schedule is not None
    graph, problem = solution.problem.graph, solution.problem
    reasons = {d.storage: d.reason for d in solution.decisions}
    as_it_is = unplanned_schedule(graph, in_place=problem.in_place)
    devices = [
        _Recording(graph, solution.schedule, reasons, device=0),
        _Recording(graph, as_it_is, dict.fromkeys(reasons, "the step as it is: nothing is dropped"), device=1),
    ]
    return {
        "segments": [segment for device in devices for segment in device.segments()],
        "device_traces": [device.trace for device in devices],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        "external_annotations": [],
    }


class _Recording:
    """One step under the allocator; what was there before it has been allocated when the recording begins."""

    def __init__(self, graph: Graph, schedule: Schedule, reasons: dict[int, str], *, device: int) -> None:
        self.graph, self.schedule, self.reasons, self.device = graph, schedule, reasons, device
        self.memory = CachingAllocator()
        self.trace: list[Record] = []
        self.held: dict[int, Record] = {}  # address -> what lies there
        self.parts: list[tuple[int, int, bool]] = []  # address, bytes and pool of every segment
        self._start()
        self._run()

    def _start(self) -> None:
        for storage in sorted({v.storage for v in self.graph.values if v.producer is None}):
            nbytes = self.graph.storages[storage].nbytes
            if nbytes:
                frames = [_frame("before the step", 0, self.graph.storage_names[storage])]
                self._allocate(nbytes, frames, time_us=0)

    def _run(self) -> None:
        clock = [int(event.start_us) for event in walk(self.graph, self.schedule)]
        found = blocks(self.graph, self.schedule)
        pieces: dict[int, Piece] = {}
        last = len(self.schedule.steps) - 1
        self.trace.clear()  # a recording begins with the step
        for step, block, begins in requests(found):
            if begins:
                pieces[block] = self._allocate(found[block].nbytes, self._frames(found[block]), time_us=clock[step])
            elif step < last or not found[block].tenants:  # what outlives the step stays
                self._free(pieces.pop(block), time_us=clock[min(step + 1, last)])

    def _allocate(self, nbytes: int, frames: list[Record], *, time_us: int) -> Piece:
        reserved = self.memory.reserved_bytes
        piece = self.memory.allocate(nbytes)
        grown = self.memory.reserved_bytes - reserved
        address = FIRST_ADDRESS + piece.address
        if grown:
            self.parts.append((address, grown, piece.small))
            self._note("segment_alloc", address, grown, frames, time_us)
        self._note("alloc", address, nbytes, frames, time_us)
        self.held[address] = {
            "address": address,
            "size": piece.nbytes,
            "requested_size": nbytes,
            "state": "active_allocated",
            "frames": frames,
        }
        return piece

    def _free(self, piece: Piece, *, time_us: int) -> None:
        gone = self.held.pop(FIRST_ADDRESS + piece.address)
        for action in ("free_requested", "free_completed"):
            self._note(action, gone["address"], gone["requested_size"], gone["frames"], time_us)
        self.memory.free(piece)

    def _note(self, action: str, address: int, nbytes: int, frames: list[Record], time_us: int) -> None:
        self.trace.append(
            {"action": action, "addr": address, "size": nbytes, "stream": 0, "time_us": time_us, "frames": frames}
        )

    # -- what is said of a block ------------------------------------------------------------------------------

    def _frames(self, block: Block) -> list[Record]:
        """Where it comes from and why it is there, as a stack: the innermost first."""
        step = self.schedule.steps[block.first_step]
        if not block.tenants:
            assert isinstance(step, Run)
            return [*_source(self.graph.ops[step.op]), _frame("plan", 0, "the op's own workspace, while it runs")]
        frames: list[Record] = []
        for storage, _ in block.tenants:
            made = self.graph.maker[storage]
            frames += [] if made is None else _source(self.graph.ops[made])
            frames.append(_frame("plan", 0, self._reason(storage, step)))
        return frames

    def _reason(self, storage: int, step: object) -> str:
        name, why = self.graph.storage_names[storage], self.reasons.get(storage, "")
        if not isinstance(step, Run):
            return f"{name}, brought back from the host: {why}"
        again = "recomputed" if step.kind is RunKind.RERUN else "made"
        return f"{name}, {again}: {why}"

    # -- what is left -----------------------------------------------------------------------------------------

    def segments(self) -> Iterator[Record]:
        """Every segment as the step leaves it."""
        for address, nbytes, small in self.parts:
            inside = sorted(a for a in self.held if address <= a < address + nbytes)
            pieces = list(_with_gaps([self.held[a] for a in inside], address, address + nbytes))
            in_use = sum(piece["size"] for piece in pieces if piece["state"] == "active_allocated")
            yield {
                "device": self.device,
                "address": address,
                "total_size": nbytes,
                "allocated_size": in_use,
                "active_size": in_use,
                "requested_size": sum(piece["requested_size"] for piece in pieces),
                "stream": 0,
                "segment_type": "small" if small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": pieces,
            }


def _with_gaps(held: Sequence[Record], start: int, end: int) -> Iterator[Record]:
    """What lies in a segment, with what is free between."""
    for piece in [*held, {"address": end, "size": 0}]:
        gap = piece["address"] - start
        if gap:
            yield {"address": start, "size": gap, "requested_size": 0, "state": "inactive", "frames": []}
        if piece["size"]:
            yield piece
        start = piece["address"] + piece["size"]


def _source(op: Op) -> list[Record]:
    """The line of the user's code, where it is known, and the module and op that it became."""
    place, _, code = op.source_line.partition(" ")
    file, _, line = place.rpartition(":")
    lines = [_frame(file, int(line), code)] if file and line.isdecimal() else []
    return [_frame(op.module_path or op.phase.value, op.id, f"{op.name} = {op.target}"), *lines]


def _frame(file: str, line: int, name: str) -> Record:
    return {"filename": file, "line": line, "name": name}
