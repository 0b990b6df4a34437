"""Eager beside captured, and eager beside planned: equal to the bit after every step, or the names of what differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import strategies
from planner.analysis import candidates
from planner.ir import Graph, Rerun
from planner.plan import Plan
from planner.schedule import Run, RunKind, lower
from planner.simulator import simulate
from planner.solve import Problem, Solution, solve
from profiler.measuring.meters import CpuMeter, peak_above_start
from profiler.measuring.op_times import measure
from profiler.measuring.restoring import state_kept
from profiler.tracing.whole_step import TracedStep, capture
from rewriter.replay import apply

Workload = tuple[Any, ...]  # train_step, model, optimizer, batch
Make = Callable[[], Workload]
Step = Callable[[Any], Any]
Between = Callable[[int, Any, Any], None]


def seeded(make: Make) -> Workload:
    """The same workload each time."""
    torch.manual_seed(0)
    return make()


def measured(workload: Workload, **options: Any) -> TracedStep:
    """Captured, with measured times and workspaces."""
    traced = capture(*workload, **options)
    return measure(traced, workload[3], show_progress=False).traced


# -- what a few steps leave behind --------------------------------------------------------------------------------


def varied(batch: Any, steps: int) -> list[Any]:
    """Other values at each step, in the same shapes."""
    generator = torch.Generator().manual_seed(7)

    def vary(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape).clone()

    return [pytree.tree_map_only(Tensor, vary, batch) for _ in range(steps)]


def history(call: Step, workload: Workload, *, steps: int, between: Between | None = None) -> list[Any]:
    """Everything there is after each of `steps` calls on varied batches, from one seed."""
    _, model, optimizer, batch = workload
    seen = []
    torch.manual_seed(1)
    for i, one in enumerate(varied(batch, steps)):
        seen.append(snapshot(call(one), model, optimizer))
        if between is not None:
            between(i, model, optimizer)
    return seen


def own_step(workload: Workload) -> Step:
    """The user's own step, as a function of the batch alone."""
    step, model, optimizer, _ = workload
    return lambda batch: step(model, optimizer, batch)


def eager(workload: Workload, *, steps: int, between: Between | None = None) -> list[Any]:
    """The history of the user's own step."""
    return history(own_step(workload), workload, steps=steps, between=between)


def snapshot(result: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of what the step returned, gradients, parameters, buffers, modes, optimizer state, generator."""
    leaves, tree = pytree.tree_flatten(result)
    record: dict[str, Any] = {"result tree": str(tree), "rng": torch.get_rng_state()}
    record |= {f"result {i}": leaf for i, leaf in enumerate(leaves)}
    record |= {f"grad {n}": p.grad for n, p in model.named_parameters()}
    record |= {f"param {n}": p for n, p in model.named_parameters()}
    record |= {f"buffer {n}": b for n, b in model.named_buffers()}
    record |= {f"training {n}": m.training for n, m in model.named_modules()}
    leaves = pytree.tree_flatten_with_path(optimizer.state_dict())[0]
    record |= {f"optimizer {pytree.keystr(path)}": leaf for path, leaf in leaves}
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in record.items()}


def assert_same(expected: Sequence[dict[str, Any]], actual: Sequence[dict[str, Any]]) -> None:
    """Equal to the bit after every step."""
    assert len(expected) == len(actual)
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert list(a) == list(b), f"after step {i + 1}"
        wrong = [name for name in a if not same_bits(a[name], b[name])]
        assert not wrong, f"after step {i + 1}: {len(wrong)} of {len(a)} differ, first {wrong[:5]}"


def same_bits(a: Any, b: Any) -> bool:
    """Equal to the last bit, laid out alike: -0.0 is not 0.0, and NaN is NaN. Written apart from the proof's own."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.layout == b.layout == torch.sparse_coo:
        return same_bits(a._indices(), b._indices()) and same_bits(a._values(), b._values())
    if a.dtype != b.dtype or a.shape != b.shape or a.stride() != b.stride():
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


# -- captured -----------------------------------------------------------------------------------------------------


class Recaptured:
    """The captured step, captured anew whenever it is no longer the one that was."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        self.workload, self.options, self.captures = workload, options, 0
        self.capture(workload[3])

    def capture(self, batch: Any) -> None:
        self.traced = capture(*self.workload[:3], batch, **self.options)
        self.captures += 1

    def __call__(self, batch: Any) -> Any:
        if self.traced.convention.check(batch):
            self.capture(batch)
        return self.traced.run(batch)


def assert_captured_equals_eager(
    make: Make,
    *,
    steps: int = 3,
    between: Between | None = None,
    recaptures: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> TracedStep:
    """Make the same step twice, run one eagerly and one captured, and compare everything after each step.

    `between` runs after each step on both, as a training loop would. `recaptures` is how often the step must be
    captured anew because it is no longer the captured one. Every step runs, and is captured, inside `around()`;
    `options` are those of `capture`.
    """

    def inside(call: Step) -> Step:
        def called(batch: Any) -> Any:
            with around():
                return call(batch)

        return called

    own = seeded(make)
    expected = history(inside(own_step(own)), own, steps=steps, between=between)
    workload = seeded(make)
    with around():
        captured = Recaptured(workload, **options)
    assert_same(expected, history(inside(captured), workload, steps=steps, between=between))
    assert captured.captures == 1 + recaptures
    captured.traced.graph.validate()
    return captured.traced


# -- planned ------------------------------------------------------------------------------------------------------


def dropped_share(solution: Solution) -> float:
    """How much of the bytes that a plan may drop it does drop."""
    graph = solution.problem.graph
    total = sum(graph.storages[s].nbytes for s in candidates(graph))
    return sum(graph.storages[s].nbytes for s in solution.dropped) / total


def rerun_kinds(solution: Solution) -> set[Rerun]:
    """The kinds of ops among what is recomputed."""
    assert solution.schedule is not None
    steps = [s for s in solution.schedule.steps if isinstance(s, Run) and s.kind is RunKind.RERUN]
    return {solution.problem.graph.ops[s.op].rerun for s in steps}


def equally_fast(graph: Graph) -> Graph:
    """The same graph with the same time for every op: what is planned for it is the same on every machine."""
    return graph.with_times((1.0,) * len(graph.ops), timing=graph.timing)


def demanding(graph: Graph, spec: str, *, wanted: Collection[Rerun] = ()) -> Solution:
    """What a strategy answers to the largest budget for which it drops at least 30% of the activation bytes, and
    reruns ops of every kind in `wanted`."""
    graph = equally_fast(graph)
    unplanned = simulate(graph, lower(graph, Plan()))
    for share in (0.6, 0.4, 0.2, 0.0):
        budget = graph.start_bytes + int(share * unplanned.above_start_bytes)
        solution = solve(Problem(graph=graph, budget_bytes=budget, time_limit_s=1.0), strategies.make(spec))
        if dropped_share(solution) >= 0.3 and rerun_kinds(solution).issuperset(wanted):
            return solution
    raise AssertionError(
        f"{spec} drops {dropped_share(solution):.0%} at most and reruns {rerun_kinds(solution)}, not {wanted}"
    )


def assert_planned_equals_eager(
    make: Make,
    *specs: str,
    wanted: Collection[Rerun] = (Rerun.WITHOUT_SIDE_EFFECT, Rerun.REPLAY_RNG),
    steps: int = 3,
    between: Callable[[], Between] = lambda: lambda i, model, optimizer: None,
    **options: Any,
) -> TracedStep:
    """Make the workload twice, run one eagerly and one under a demanding plan of each of `specs`, and compare every
    step.

    `between()` makes what happens after each step, once for each run.
    """
    expected = eager(seeded(make), steps=steps, between=between())
    workload = seeded(make)
    traced = measured(workload, **options)
    for spec in specs:
        module = apply(traced, demanding(traced.graph, spec, wanted=wanted).schedule)
        with state_kept(workload[1], workload[2]):
            run = partial(traced.convention.call, module)
            assert_same(expected, history(run, workload, steps=steps, between=between()))
    return traced


def measured_peak(call: Callable[[], Any], workload: Workload) -> int:
    """The allocator's peak of one call above what is live before it, with `.grad` None; nothing is changed by it."""
    _, model, optimizer, _ = workload
    with state_kept(model, optimizer):
        call()  # state that is made lazily is part of the start
        for p in model.parameters():
            p.grad = None
        return peak_above_start(CpuMeter(), call)
