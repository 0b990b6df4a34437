"""Per-op time and memory of a captured step: μ-TWO's Algorithm A.

One warm-up run, one run that watches the allocator, three timed runs, medians. The step runs op by op on the
user's own tensors, and everything is put back afterwards. It runs unplanned, or in the order of any other schedule: a
step that does not fit as it is can be measured under a provisional plan.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, assert_never

from rich.progress import Progress
from torch import Tensor, fx

from planner.ir import Graph, Op, Rerun, Timing, TimingKind
from planner.schedule import RunKind, Schedule, unplanned_schedule
from planner.walk import Freed, Launched, Ran, Waited, walk
from profiler.collectives import communicates
from profiler.errors import MODEL_DOOR, CaptureError
from profiler.measuring.collective_times import CollectiveCost, collective_costs
from profiler.measuring.hosts import Host
from profiler.measuring.live_moves import LiveMoves
from profiler.measuring.memory import is_exhaustion
from profiler.measuring.meters import MemorySample, Meter, meter_for
from profiler.measuring.pooling import pooled
from profiler.measuring.restoring import Touched
from profiler.op_forms import Generator, form_of
from profiler.ops import NUMBER, memory_of
from profiler.random_replay import ReplayingRng, generator_state
from profiler.tracing.eager_ways.assumptions import taken_to_hold
from profiler.tracing.fake_tensors.patches import below_autograd
from profiler.tracing.whole_step import TracedStep
from profiler.workload import device_of

log = logging.getLogger("recompute_planner")

T = TypeVar("T")

TIMED_RUNS = 3
# A call shorter than this is repeated until it fills it: the clock and the call of the clock are not the op.
SHORTEST_US = 40.0
MOST_REPEATS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class OpStats:
    """What was measured of one op, by itself: in the graph, times of equal ops are pooled.

    Bytes are of all live memory, what was live before the step included.
    """

    time_us: float
    spread_us: float  # largest less smallest of the timed runs
    before_bytes: int
    peak_bytes: int
    output_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A captured step whose graph carries measured times and workspaces, and the samples behind them."""

    traced: TracedStep
    stats: tuple[OpStats, ...]

    @property
    def graph(self) -> Graph:
        return self.traced.graph


def measure(
    traced: TracedStep,
    batch: Any,
    *,
    schedule: Schedule | None = None,
    meter: Meter | None = None,
    show_progress: bool = True,
    host: Host | None = None,
) -> Measured:
    """Measure every op of the captured step on `batch`; whatever the step writes to is put back.

    `schedule` is one of the captured step's graph that needs less memory than the unplanned one; what it runs again is
    run but not counted, and what it moves goes to `host`.
    """
    started = time.perf_counter()
    traced.check_runnable()
    convention = traced.convention
    wrong = convention.check(batch)
    if wrong:
        raise CaptureError(f"not the batch, model or optimizer that was captured: {'; '.join(wrong[:3])}")
    meter = meter or meter_for(device_of(convention.model))
    schedule = schedule if schedule is not None else unplanned_schedule(traced.graph)
    with (
        Touched.by(traced, batch).kept(),
        below_autograd(),
        taken_to_hold(),
        Progress(transient=True, disable=not show_progress) as bar,
    ):
        task = bar.add_task("measuring the step", total=(2 + TIMED_RUNS) * len(schedule.steps))
        runner = _Runner(traced, schedule, lambda: convention.gather(batch), lambda: bar.advance(task), host)
        warm_us = runner.timed(meter, [1] * len(traced.graph.ops))
        samples = runner.watched(meter)
        repeats = [_repeats(traced.graph, op, us) for op, us in enumerate(warm_us)]
        laps = [runner.timed(meter, repeats) for _ in range(TIMED_RUNS)]
        costs = collective_costs(traced.graph, traced.nodes, meter)
    measured = _collect(_as_made(traced, runner.made_bytes), schedule, samples, laps, costs, meter)
    log.info(
        "measured %s in %.2f s: its ops take %.1f ms, %s",
        traced.graph.name,
        time.perf_counter() - started,
        measured.graph.time_us / 1e3,
        measured.graph.timing,
    )
    return measured


def _repeats(graph: Graph, op: int, warm_us: float) -> int:
    """How often to run an op for one reading; once where a second run would change anything.

    Once, too, where it communicates: how often each rank's clock would ask for it differs.
    """
    record = graph.ops[op]
    if record.rerun is not Rerun.FREELY or warm_us >= SHORTEST_US or communicates(record.target):
        return 1
    return min(MOST_REPEATS, math.ceil(SHORTEST_US / max(warm_us, 0.1)))


class _Runner:
    """Runs a schedule op by op on live tensors, handing every call to a stopwatch or a probe."""

    def __init__(
        self,
        traced: TracedStep,
        schedule: Schedule,
        inputs: Callable[[], list[Any]],
        advance: Callable[[], None],
        host: Host | None = None,
    ) -> None:
        self.traced = traced
        self.host = host
        self.events = tuple(walk(traced.graph, schedule))
        self.inputs = inputs
        self.advance = advance
        self.live: dict[fx.Node, Any] = {}
        self.states: dict[int, Tensor] = {}  # storage -> the generator state saved in it
        self.made_bytes: dict[int, int] = {}  # storage -> what its op really allocated for it

    def timed(self, meter: Meter, repeats: list[int]) -> list[float]:
        """Time per op, in µs; freeing a storage counts for the op that made it: whoever reruns it frees again."""
        watch, owners, freed = meter.stopwatch(), list[int | None](), set[int]()
        self._start()
        for event in self.events:
            match event:
                case Ran():
                    times = 1 if event.again or event.step.into is not None else repeats[event.op.id]
                    result = _told(event.op, partial(watch.lap, self._call(event), repeats=times))
                    self._bind(event, result)
                    owners.append(None if event.again else event.op.id)
                    del result
                case Freed():
                    doomed = self._take(event.step.storage)
                    watch.lap(doomed.clear)
                    owners.append(None if event.step.storage in freed else self.traced.graph.maker[event.step.storage])
                    freed.add(event.step.storage)
                case Launched() | Waited():
                    self.moves.take(event.step, self.live)
                case _:
                    assert_never(event)
            self.advance()
        totals = [0.0] * len(self.traced.graph.ops)
        for op, us in zip(owners, watch.laps_us(), strict=True):
            if op is not None:
                totals[op] += us
        return totals

    def watched(self, meter: Meter) -> list[MemorySample]:
        """Memory before, during and after every run of the schedule."""
        self._start()
        with meter.memory_probe() as probe:
            for event in self.events:
                match event:
                    case Ran():
                        self._bind(event, probe.watch(self._call(event)))
                    case Freed():
                        self._take(event.step.storage)
                    case Launched() | Waited():
                        self.moves.take(event.step, self.live)
                    case _:
                        assert_never(event)
                self.advance()
        return list(probe.samples())

    def _start(self) -> None:
        module = self.traced.module
        self.moves = LiveMoves(self.traced, self.host)
        self.live = dict(zip(module.graph.find_nodes(op="placeholder"), self.inputs(), strict=True))
        for node in module.graph.find_nodes(op="get_attr"):
            self.live[node] = getattr(module, str(node.target))

    def _call(self, ran: Ran) -> Callable[[], Any]:
        """The run, in the form in which the replayed step runs it; a state that it saves is no part of its own cost."""
        form = form_of(ran.step, ran.op, self.traced.nodes[ran.op.id])
        args, kwargs = fx.node.map_arg((form.args, form.kwargs), self.live.__getitem__)
        state = ran.op.rng_state
        match form.generator:
            case Generator.AS_IT_IS:
                return lambda: form.target(*args, **kwargs)
            case Generator.SAVED:
                assert state is not None
                self.states[state] = generator_state(form.device)
                return lambda: form.target(*args, **kwargs)
            case Generator.REPLAYED:
                assert state is not None
                again, saved = ReplayingRng(form.target, form.device), self.states[state]
                return lambda: again(saved, *args, **kwargs)
            case _:
                assert_never(form.generator)

    def _bind(self, ran: Ran, result: Any) -> None:
        graph, node = self.traced.graph, self.traced.nodes[ran.op.id]
        if ran.step.into is not None:
            self._take(ran.step.into)
        if NUMBER in node.meta:
            self.live[node] = result
        for v in ran.op.outputs:
            value, captured = graph.values[v], self.traced.value_nodes[v]
            if value.base is None and value.storage not in ran.made:
                continue  # a second copy of what is there is dropped
            made = self.live[captured] = result if captured is node else result[captured.args[1]]
            if value.base is None:  # None: some ops leave out what nobody asked for only when they run
                self.made_bytes[value.storage] = 0 if made is None else memory_of(made).nbytes()

    def _take(self, storage: int) -> list[Tensor]:
        """Let go of every value in a storage; the list returned holds the last references."""
        nodes = (self.traced.value_nodes[v] for v in self.traced.graph.values_in[storage])
        saved = [self.states.pop(storage)] if storage in self.states else []
        return [*(self.live.pop(node) for node in nodes if node in self.live), *saved]


def _told(op: Op, run: Callable[[], T]) -> T:
    """What a run gives; an op that fails on the user's own tensors, as it did not when it was traced, by its name."""
    try:
        return run()
    except RuntimeError as error:
        if is_exhaustion(error):
            raise
        raise CaptureError(
            f"{op.source_line or op.module_path or op.name}: {op.target} fails on your tensors, though it did not on "
            f"fake ones: {error}. {MODEL_DOOR}"
        ) from error


def _as_made(traced: TracedStep, made_bytes: dict[int, int]) -> TracedStep:
    """The step with the real sizes of its storages: no shape tells what mkldnn's recurrent layer makes."""
    storages = tuple(replace(s, nbytes=made_bytes.get(s.id, s.nbytes)) for s in traced.graph.storages)
    return replace(traced, graph=replace(traced.graph, storages=storages))


def _collect(
    traced: TracedStep,
    schedule: Schedule,
    samples: list[MemorySample],
    laps: list[list[float]],
    costs: dict[int, CollectiveCost],
    meter: Meter,
) -> Measured:
    graph = traced.graph
    waits_us = {graph.wait_of[launch]: cost.time_us for launch, cost in costs.items()}
    scratch = dict.fromkeys(waits_us, 0) | {launch: cost.scratch_bytes for launch, cost in costs.items()}
    counted = [pair for pair in zip(schedule.runs, samples, strict=True) if pair[0].kind is not RunKind.RERUN]
    counted.sort(key=lambda pair: pair[0].op)
    stats = []
    for run, sample in counted:
        readings = [lap[run.op] for lap in laps]
        made = sum(graph.storages[s].nbytes for s in graph.makes[run.op])
        fresh = made if run.into is None else 0
        stats.append(
            OpStats(
                time_us=waits_us.get(run.op, statistics.median(readings)),
                spread_us=max(readings) - min(readings),
                before_bytes=graph.start_bytes + sample.before_bytes,
                peak_bytes=graph.start_bytes + sample.peak_bytes,
                output_bytes=made,
                workspace_bytes=scratch.get(run.op, max(0, sample.peak_bytes - sample.before_bytes - fresh)),
            )
        )
    times = pooled(traced.nodes, [s.time_us for s in stats], in_place=[run.into is not None for run, _ in counted])
    times = [waits_us.get(op.id, time_us) for op, time_us in zip(graph.ops, times, strict=True)]
    ops = tuple(
        replace(op, time_us=time_us, workspace_bytes=s.workspace_bytes)
        for op, time_us, s in zip(graph.ops, times, stats, strict=True)
    )
    timing = Timing(kind=TimingKind.MEASURED, device=meter.device)
    measured = replace(graph, ops=ops, timing=timing).validate()
    return Measured(traced=replace(traced, graph=measured), stats=tuple(stats))
