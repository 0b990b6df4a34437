"""What collectives take, in time and memory: each kind, size and group by itself, launched and waited for at once."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir import Graph
from profiler.collectives import operators
from profiler.measuring.meters import Meter

RUNS = 4  # the same number on every rank; the first one is not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What a collective takes on this rank, beside what it makes."""

    time_us: float  # from when its launch, an op with a time of its own, has returned to the end of its wait
    scratch_bytes: int  # allocated by a thread of its own, so at any time in between


def collective_costs(graph: Graph, nodes: tuple[fx.Node, ...], meter: Meter) -> dict[int, CollectiveCost]:
    """Per op that launches a collective: what the whole of it takes.

    Inside of a step a rank would also wait for the ranks that compute longer, and its scratch memory would be seen in
    the launch, in the wait or in neither, as threads happen to run. Every rank measures the same collectives in the
    same order, or none of them goes on; the maximum over the ranks is for who has all of them.
    """
    known: dict[object, CollectiveCost] = {}
    found: dict[int, CollectiveCost] = {}
    for launch in sorted(graph.wait_of):
        node, work = nodes[launch], graph.ops[launch].collective
        assert work is not None
        key = (work.kind, work.group, work.nbytes, node.target)
        if key not in known:
            known[key] = _measured(node, meter)
        found[launch] = known[key]
    return found


def _like(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _measured(launch: fx.Node, meter: Meter) -> CollectiveCost:
    target: Any = launch.target
    given = [_like(arg) if isinstance(arg, fx.Node) else arg for arg in launch.args]
    times = []
    for _ in range(RUNS):
        watch = meter.stopwatch()
        made = target(*given)
        watch.lap(partial(operators().wait_tensor, made))
        times += watch.laps_us()
    del made

    def run() -> Tensor:
        tensor: Tensor = target(*given)
        operators().wait_tensor(tensor)
        return tensor

    with meter.memory_probe() as probe:
        kept = probe.watch(run)
    (sample,) = probe.samples()
    is_new = all(
        kept.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()
        for one in given
        if isinstance(one, Tensor)
    )
    made_bytes = kept.untyped_storage().nbytes() if is_new else 0
    scratch_bytes = max(0, sample.peak_bytes - sample.before_bytes - made_bytes)
    return CollectiveCost(time_us=statistics.median(times[1:]), scratch_bytes=scratch_bytes)
