"""`python -m bench accept`: what is promised, put to the test on the machine at hand; a verdict for every promise.

Models x optimizers x doors against eager, and on one larger step what was predicted of memory and time against what
is measured. Each case is a sentence or a few; one that cannot be tried here says why.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

import strategies
from bench.experiments.acceptance_moves import moved_step
from bench.experiments.acceptance_ranks import RANKS, two_ranks
from bench.experiments.comparison.peers import measure_peer
from bench.experiments.exactness import MODELS, OPTIMIZER_NAMES
from bench.experiments.experiment import Experiment, Results, line_by_line
from bench.experiments.results_file import resumed_rows, save_rows
from bench.machine.clock import Clock
from bench.show.tables import markdown
from bench.show.terminal import stage
from bench.workloads.peers import NotForThisModelError
from bench.workloads.spec import OPTIMIZERS, WorkloadSpec, moved, torch_device
from bench.workloads.zoo import ZOO
from planner.solve import Problem, solve
from planner.units import human_bytes
from profiler.backend import accelerators, backend_for, free_caches
from profiler.measuring.memory import OutOfMemory, guarded
from profiler.workload import Workload
from rewriter import checkpoint, checkpoint_model
from rewriter.budgets import OverBudget
from rewriter.pipeline import prepare
from rewriter.proof import Verification
from rewriter.step import CheckpointedStep

T = TypeVar("T")

BUDGETS = ("70%", "100%")  # the first that can be met: on small models gradients may leave nothing to plan
STEPS = 3  # of each version, where they are compared
ROUNDS = 7  # of both in turn, where they are timed
CLOSE = 0.01  # of what was measured: how far a prediction of memory may be off
CLOSE_RESERVED = 0.10
CLOSE_TO_NEIGHBOUR = 0.05  # of eager's time: what two measurements of the same may differ by
CLOSE_TIME = 0.15  # of eager's time: how much more than predicted a planned step may take

NEIGHBOUR = "torch.utils.checkpoint, every block"

# The step that is measured, larger where there is a GPU.
MEASURED = {
    "cpu": WorkloadSpec(model="resnet18", batch=16, image=96),
    "cuda": WorkloadSpec(model="resnet50", batch=32),
}


class Promise(Enum):
    """What is said of every planned step."""

    EXACT = "a planned step does the same arithmetic, to the bit"
    EXACT_MODEL = "so does a planned model in a loop of one's own"
    PEAK = "the predicted peak is the allocated one"
    BUDGET = "the budget is kept"
    RESERVED = "a GPU's allocator holds what was predicted"
    TIME = "the extra time is about what was predicted"
    NEIGHBOURS = "in as much memory, a plan is no slower than checkpointed blocks"
    MOVES = "tensors that are moved to the host come back as they went, also where every copy is late"
    RANKS = "a planned step on two ranks does what eager does there"


class Verdict(Enum):
    """What was found of a promise."""

    KEPT = "kept"
    BROKEN = "BROKEN"
    NOT_HERE = "not to be tried here"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRow:
    """One promise in one case."""

    case: str
    promise: Promise
    verdict: Verdict
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceSettings:
    """What rows of one file share."""

    device: str
    name: str  # what the device calls itself


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something to try: whatever goes wrong in it is a verdict on its first promise."""

    title: str
    promise: Promise
    run: Callable[[], Sequence[AcceptanceRow]]


def run_acceptance(device: str, *, out: Path | None) -> list[AcceptanceRow]:
    """Every case in turn, saved as they come; those that `out` has already are not run again."""
    place = torch_device(device)
    settings = AcceptanceSettings(device=device, name=backend_for(place).meter().device)
    rows = resumed_rows(out, ACCEPTANCE, settings=settings) if out is not None else []
    done = {row.case for row in rows}
    for case in cases(place):
        if case.title in done:
            continue
        with stage(case.title):
            rows += tried(case)
        if out is not None:
            save_rows(out, ACCEPTANCE, rows, settings=settings)
    ACCEPTANCE.print(f"What is promised, on {settings.name}", rows)
    return rows


def tried(case: Case) -> list[AcceptanceRow]:
    """What a case found; an error is a verdict, in a sentence."""
    said, verdict = "", Verdict.BROKEN
    try:
        return list(guarded(case.title, case.run))
    except OutOfMemory as error:
        said, verdict = str(error), Verdict.NOT_HERE
    except Exception as error:  # whatever it is, the others are tried, and the row tells it
        said = f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
        free_caches()
    return [AcceptanceRow(case=case.title, promise=case.promise, verdict=verdict, said=" ".join(said.split())[:400])]


def cases(device: torch.device) -> Iterator[Case]:
    """Small models with every optimizer through both doors, then one larger step with the meters on."""
    for model in MODELS:
        for optimizer in OPTIMIZER_NAMES:
            make = partial(_small, model, optimizer, device)
            title = f"{model}, {optimizer}"
            whole = f"{title}, whole step"
            yield Case(title=whole, promise=Promise.EXACT, run=partial(_whole_step, make, whole))
            loop = f"{title}, model in a loop"
            yield Case(title=loop, promise=Promise.EXACT_MODEL, run=partial(_model_in_loop, make, loop))
    spec = MEASURED[device.type if device.type in accelerators() else "cpu"]
    make = partial(_on_device, spec, device)
    yield Case(title=f"{spec.title}, measured", promise=Promise.TIME, run=partial(_measured, make, spec.title))
    title = f"{spec.title}, beside checkpointed blocks"
    there = replace(spec, device=str(device))
    yield Case(title=title, promise=Promise.NEIGHBOURS, run=partial(_beside_blocks, there, make, title))
    model, optimizer = list(MODELS)[-1], OPTIMIZER_NAMES[0]  # whose peak is made of what can be moved
    title = f"{model}, {optimizer}, moved to the host"
    small = partial(_small, model, optimizer, device)
    yield Case(title=title, promise=Promise.MOVES, run=partial(_moved_to_host, small, device, title))
    title = "a small gpt2 as replicas on two ranks"
    yield Case(title=title, promise=Promise.RANKS, run=partial(_on_two_ranks, device, title))


def _small(model: str, optimizer: str, device: torch.device) -> Workload:
    batch, options = MODELS[model]
    made = ZOO[model](batch, optimizer=OPTIMIZERS[optimizer], **options)
    return made._replace(batch=moved(made.model, made.optimizer, made.batch, device))


def _on_device(spec: WorkloadSpec, device: torch.device) -> Workload:
    made = spec.make()
    return made._replace(batch=moved(made.model, made.optimizer, made.batch, device))


# -- what is tried --------------------------------------------------------------------------------------------------


def _met(run: Callable[[str], T]) -> T:
    """`run` at the first of the budgets that can be met."""
    for budget in BUDGETS[:-1]:
        try:
            return run(budget)
        except OverBudget:
            continue
    return run(BUDGETS[-1])


def _whole_step(make: Callable[[], Workload], title: str) -> list[AcceptanceRow]:
    """All is dropped that can be, and both versions run from the same state."""
    workload = make()
    ready = prepare(workload, ["100%"])
    solution = solve(Problem(graph=ready.graph, budget_bytes=1), strategies.make("mutwo"))
    assert solution.schedule is not None
    seen = ready.proof(ready.replayed(solution.schedule), solution, workload.batch, steps=STEPS)
    return [_row(title, Promise.EXACT, seen.exact, str(seen)), _peak_row(seen, title)]


def _planned(workload: Workload) -> CheckpointedStep:
    return _met(
        lambda budget: checkpoint(*workload, budget=budget, strategy="mutwo", verify=STEPS, show_progress=False)
    )


def _peak_row(seen: Verification, title: str) -> AcceptanceRow:
    measured, predicted = human_bytes(seen.measured_peak_bytes), human_bytes(seen.predicted_peak_bytes)
    said = f"{measured} above the start measured, {predicted} predicted: {seen.prediction_error:+.2%}"
    return _row(title, Promise.PEAK, abs(seen.prediction_error) <= CLOSE, said)


def _budget_row(step: CheckpointedStep, seen: Verification, title: str) -> AcceptanceRow:
    limit = step.solution.problem.budget_bytes
    peak = step.solution.problem.graph.start_bytes + seen.measured_peak_bytes
    return _row(title, Promise.BUDGET, peak <= limit, f"{human_bytes(peak)} of {human_bytes(limit)} used")


def _row(title: str, promise: Promise, kept: bool, said: str) -> AcceptanceRow:
    return AcceptanceRow(case=title, promise=promise, verdict=Verdict.KEPT if kept else Verdict.BROKEN, said=said)


def _model_in_loop(make: Callable[[], Workload], title: str) -> list[AcceptanceRow]:
    """The same loop twice from one seed, once with the model planned: everything that it leaves is compared."""
    planned, found = _met(partial(_trained_planned, make))
    expected = _trained(make())
    differing = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    said = f"{len(expected)} tensors after {STEPS} steps: equal to the bit; by {planned}"
    if differing:
        said = f"{differing[0]} and {len(differing) - 1} more of {len(expected)} differ after {STEPS} steps"
    return [_row(title, Promise.EXACT_MODEL, not differing, " ".join(said.split())[:400])]


def _trained_planned(make: Callable[[], Workload], budget: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """What says how the model was planned, and what it leaves."""
    workload = make()
    model: Any = checkpoint_model(workload.model, budget=budget, strategy="mutwo")
    left = _trained(workload)
    return model.planned.solution, left


def _trained(workload: Workload) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    left: dict[str, torch.Tensor] = {}
    for i in range(STEPS):
        left[f"loss of step {i}"] = workload.run_once().detach().clone()
    left |= {f"parameter {name}": p.detach() for name, p in workload.model.named_parameters()}
    left |= {f"gradient of {n}": p.grad for n, p in workload.model.named_parameters() if p.grad is not None}
    return left | {f"buffer {name}": b for name, b in workload.model.named_buffers()}


def _measured(make: Callable[[], Workload], title: str) -> list[AcceptanceRow]:
    """Memory that the allocator holds, and time in turn with eager."""
    workload = make()
    step = _planned(workload)
    assert step.verification is not None
    case = f"{title}, measured"
    return [
        _peak_row(step.verification, case),
        _budget_row(step, step.verification, case),
        _reserved_row(step, workload, case),
        _time_row(step, workload, case),
    ]


def _reserved_row(step: CheckpointedStep, workload: Workload, title: str) -> AcceptanceRow:
    backend, held = backend_for(workload.device), step.solution.held
    gc.collect()
    free_caches()
    for _ in range(STEPS):
        step(workload.batch)
    reserved = backend.reserved_bytes()
    if held is None or reserved is None:
        said = f"{backend.title}: no allocator that holds more than what lives, or none that can be simulated"
        return AcceptanceRow(case=title, promise=Promise.RESERVED, verdict=Verdict.NOT_HERE, said=said)
    said = f"{human_bytes(reserved)} reserved, {human_bytes(held.reserved_bytes)} predicted"
    return _row(title, Promise.RESERVED, reserved <= (1 + CLOSE_RESERVED) * held.reserved_bytes, said)


def _time_row(step: CheckpointedStep, workload: Workload, title: str) -> AcceptanceRow:
    ratio, predicted = _to_eager(step, workload), 1 + (step.solution.overhead or 0.0)
    said = f"{ratio:.2f}x of eager (median of {ROUNDS} in turn), {predicted:.2f}x by op times"
    return _row(title, Promise.TIME, ratio <= predicted + CLOSE_TIME, said)


def _to_eager(step: CheckpointedStep, workload: Workload) -> float:
    """Time of a planned step relative to eager's, in turn."""
    clock, batch = Clock(workload.device), workload.batch
    for call in (workload.run_once, partial(step, batch)):
        clock.seconds(call)  # the first of each makes what later ones find
    ratios = [clock.seconds(partial(step, batch)) / clock.seconds(workload.run_once) for _ in range(ROUNDS)]
    return statistics.median(ratios)


def _beside_blocks(spec: WorkloadSpec, make: Callable[[], Workload], title: str) -> list[AcceptanceRow]:
    """A plan within the measured peak of what users would pick instead, both timed in turn with eager."""
    try:
        theirs = measure_peer(spec, NEIGHBOUR, ROUNDS)
    except NotForThisModelError as error:
        return [AcceptanceRow(case=title, promise=Promise.NEIGHBOURS, verdict=Verdict.NOT_HERE, said=str(error))]
    assert theirs.peak_ratio is not None
    assert theirs.time_ratio is not None
    workload = make()
    share = f"{100 * min(1.0, theirs.peak_ratio):.2f}%"
    ratio = _to_eager(checkpoint(*workload, budget=share, show_progress=False), workload)
    said = (
        f"in {share} of what eager's step adds: {ratio:.2f}x of eager planned, {theirs.time_ratio:.2f}x by {NEIGHBOUR}"
    )
    return [_row(title, Promise.NEIGHBOURS, ratio <= theirs.time_ratio + CLOSE_TO_NEIGHBOUR, said)]


def _moved_to_host(make: Callable[[], Workload], device: torch.device, title: str) -> list[AcceptanceRow]:
    rows = []
    for how, seen, moved_there in moved_step(make, device, steps=2):
        rows.append(_row(title, Promise.MOVES, seen.exact, f"{how}: {moved_there}; {seen}"))
        rows.append(_peak_row(seen, title))
    return rows


def _on_two_ranks(device: torch.device, title: str) -> list[AcceptanceRow]:
    there = backend_for(device).count()
    if there is not None and there < RANKS:
        said = f"{there} of {RANKS} devices are there"
        return [AcceptanceRow(case=title, promise=Promise.RANKS, verdict=Verdict.NOT_HERE, said=said)]
    said = "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(two_ranks(device.type)))
    return [_row(title, Promise.RANKS, True, said)]


# -- the page -------------------------------------------------------------------------------------------------------

COLUMNS = ("case", "promise", "verdict", "what was found")


def acceptance_cells(row: AcceptanceRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    return (row.case, row.promise.value, row.verdict.value, row.said)


def verdicts(rows: Sequence[AcceptanceRow]) -> list[tuple[str, str]]:
    """One line a promise: how often it was kept, broken, or could not be tried."""
    lines = []
    for promise in Promise:
        found = [row.verdict for row in rows if row.promise is promise]
        counts = [(verdict, found.count(verdict)) for verdict in Verdict]
        said = ", ".join(f"{verdict.value} in {count}" for verdict, count in counts if count)
        lines.append((promise.value, said or "not tried"))
    return lines


def _below(results: Results[AcceptanceRow]) -> str:
    settings: Any = results.settings
    return f"\nOn {settings.name}:\n\n{markdown(('promise', 'verdict'), verdicts(results.rows))}\n"


ACCEPTANCE = Experiment(
    kind="acceptance",
    rows=(AcceptanceRow,),
    table=line_by_line(COLUMNS, acceptance_cells),
    below=_below,
    settings=AcceptanceSettings,
)
