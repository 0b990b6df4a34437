"""Times and workspaces of ops that are run one by one on made-up inputs: nothing of the user's is touched.

Ops that look alike are run once. What an op does with the values in its inputs is taken not to matter; an op that
cannot be run on made-up ones is taken to move its bytes at the rate of those that could.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir import Graph, Timing, TimingKind
from profiler.measuring.meters import Meter, meter_for
from profiler.ops import memory_of, overload, tensors_of
from profiler.tracing.fake_tensors.patches import below_autograd, generators_kept

log = logging.getLogger("recompute_planner")

RUNS = 3


@dataclass(frozen=True, slots=True)
class _Sample:
    time_us: float
    workspace_bytes: int


def sampled(graph: Graph, nodes: Sequence[fx.Node], *, device: torch.device) -> Graph:
    """The graph with times and workspaces of its ops; `nodes[op.id]` is what captured each, with concrete sizes."""
    meter = meter_for(device)
    made = [sum(graph.storages[s].nbytes for s in graph.makes[op.id]) for op in graph.ops]
    kinds = {_likeness(node): (node, made_bytes) for node, made_bytes in zip(nodes, made, strict=True)}
    with generators_kept(), below_autograd():
        samples = _samples(kinds, meter)
    known = [samples[_likeness(node)] for node in nodes]
    rate = _us_per_byte(graph, known)
    ops = tuple(
        replace(op, time_us=_moved(graph, op.id) * rate)
        if sample is None
        else replace(op, time_us=sample.time_us, workspace_bytes=sample.workspace_bytes)
        for op, sample in zip(graph.ops, known, strict=True)
    )
    timing = Timing(kind=TimingKind.MEASURED, device=meter.device)
    return replace(graph, ops=ops, timing=timing).validate()


def _likeness(node: fx.Node) -> str:
    """The same for ops that do the same work."""

    def shown(source: fx.Node) -> Any:
        return tuple((t.dtype, tuple(t.shape), _strides(t)) for t in tensors_of(source)) or "number"

    return f"{node.target} {fx.node.map_aggregate((node.args, node.kwargs), lambda a: _text(a, shown))}"


def _text(entry: Any, shown: Callable[[fx.Node], Any]) -> str:
    return str(shown(entry) if isinstance(entry, fx.Node) else entry)


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()) if tensor.layout == torch.strided else ()


def _samples(kinds: Mapping[str, tuple[fx.Node, int]], meter: Meter) -> dict[str, _Sample | None]:
    """What each kind of op takes; None for one that cannot be run by itself."""
    runs = {key: node for key, (node, _) in kinds.items() if _runs_alone(node)}
    with meter.memory_probe() as probe:  # once for all of them: it looks for garbage first, which takes a while
        for node in runs.values():
            probe.watch(_call(node))
    found: dict[str, _Sample | None] = dict.fromkeys(kinds)
    for (key, node), seen in zip(runs.items(), probe.samples(), strict=True):
        workspace = max(0, seen.peak_bytes - seen.before_bytes - kinds[key][1])
        found[key] = _Sample(_time_us(node, meter), workspace)
    return found


def _call(node: fx.Node) -> Callable[[], Any]:
    """The op on made-up inputs."""
    target: Any = node.target
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _made_up)
    return partial(target, *args, **kwargs)


def _runs_alone(node: fx.Node) -> bool:
    """Whether an op can be run on made-up inputs; it is warm then."""
    op = overload(node)
    if op is None or op.namespace not in ("aten", "prims"):
        return False
    try:
        _call(node)()
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        log.info("%s (%s) is not measured but estimated: %s", node.name, node.target, str(error).splitlines()[0])
        return False
    return True


def _time_us(node: fx.Node, meter: Meter) -> float:
    watch, call = meter.stopwatch(), _call(node)
    for _ in range(RUNS):
        watch.lap(call)
    return statistics.median(watch.laps_us())


def _made_up(node: fx.Node) -> Any:
    """A tensor like the node's: numbers that no arithmetic stumbles over, indices that are there."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    elements = max(1, memory_of(value).nbytes() // value.element_size())
    flat = torch.zeros(elements, dtype=value.dtype, device=value.device)
    if value.is_floating_point():
        flat.uniform_(0.1, 1.0)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _moved(graph: Graph, op: int) -> int:
    return sum(graph.storages[s].nbytes for s in (*graph.reads[op], *graph.makes[op])) if graph.makes[op] else 0


def _us_per_byte(graph: Graph, known: Sequence[_Sample | None]) -> float:
    pairs = [(s.time_us, _moved(graph, op)) for op, s in enumerate(known) if s is not None and _moved(graph, op)]
    return statistics.median([us / nbytes for us, nbytes in pairs]) if pairs else 1e-4
