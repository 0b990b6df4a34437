"""The strategy contract as tests. Subclass `StrategyConformance` with one fixture, and run pytest:

    from strategies.conformance import StrategyConformance

    class TestMine(StrategyConformance):
        @pytest.fixture
        def strategy(self):
            return Mine()

It imports pytest, so nothing but tests should import it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from planner.analysis import cannot_drop
from planner.errors import NoPlan
from planner.ir import Graph, Op, Phase, Rerun, Role, Storage, Value
from planner.plan import Plan
from planner.schedule import Run, lower
from planner.simulator import simulate, unplanned
from planner.solve import Problem, Solution, Status, Strategy, solve

SHARES = (0.25, 0.5, 0.75, 1.0)  # of what the unplanned step adds to its start
TIME_LIMIT_S = 10.0


class StrategyConformance:
    """What every strategy promises, checked on a handful of small training steps."""

    @pytest.fixture
    def strategy(self) -> Strategy:
        raise NotImplementedError("a subclass of StrategyConformance defines a fixture named `strategy`")

    @pytest.fixture(params=["chain", "residual", "unet", "multi_output", "accumulation", "nothing_to_drop"])
    def graph(self, request: pytest.FixtureRequest) -> Graph:
        return GRAPHS[request.param]()

    def test_it_has_a_name_that_can_stand_in_a_spec(self, strategy: Strategy) -> None:
        assert isinstance(strategy, Strategy), f"{strategy!r} lacks `name` or `plan(self, problem)`"
        name = type(strategy).name
        assert isinstance(name, str), f"name is {name!r}, not text"
        assert name, "an empty name"
        assert not set(name) & set(":,= \t\n"), f"{name!r} cannot be told from its options on the command line"

    def test_it_returns_a_plan_that_can_be_carried_out(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            assert isinstance(plan, Plan), f"plan() returned {plan!r}"
            runs = [s for s in lower(graph, plan, in_place=problem.in_place).steps if isinstance(s, Run)]
            assert len(runs) >= len(graph.ops)

    def test_two_calls_give_the_same_plan(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            again = strategy.plan(problem)
            if not (plan.cut_off or again.cut_off):
                assert again == plan, f"two plans for {_label(problem)}, and neither says that it was cut off"

    def test_it_mutates_nothing(self, strategy: Strategy, graph: Graph) -> None:
        before, fingerprint = copy.deepcopy(graph), graph.fingerprint
        for share in SHARES:
            problem = _problem(graph, share=share)
            with contextlib.suppress(NoPlan):
                strategy.plan(problem)
            assert graph == before, f"the graph was changed at {share:.0%}"
            assert problem == _problem(before, share=share), f"the problem was changed at {share:.0%}"
        assert copy.deepcopy(before).fingerprint == fingerprint == graph.fingerprint, "the fingerprint was changed"

    def test_a_generous_budget_costs_no_time(self, strategy: Strategy, graph: Graph) -> None:
        for in_place in (True, False):
            problem = _problem(graph, share=2.0, in_place=in_place)
            solution = solve(problem, strategy)
            assert solution.timeline is not None, f"no plan where everything fits: {solution.reason}"
            assert solution.timeline.recompute_us == 0, f"recomputes for {_label(problem)}, where everything fits"
            assert solution.status is Status.FITS, solution.reason

    def test_a_tiny_budget_gives_its_best_plan_or_a_reason(self, strategy: Strategy, graph: Graph) -> None:
        solution = solve(Problem(graph=graph, budget_bytes=1, time_limit_s=TIME_LIMIT_S), strategy)
        assert solution.status in (Status.OVER_BUDGET, Status.NO_PLAN)
        assert solution.reason, "NoPlan without a reason"

    def test_it_never_evicts_what_may_never_be_rerun(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            for eviction in plan.evictions:
                reason = cannot_drop(graph, eviction.storage)
                assert reason is None, f"drops {graph.storage_names[eviction.storage]!r}, but {reason}"
            steps = lower(graph, plan, in_place=problem.in_place).steps
            runs = [s.op for s in steps if isinstance(s, Run)]
            for op in graph.ops:
                assert op.rerun is not Rerun.NEVER or runs.count(op.id) == 1, f"{op.name!r} ran more than once"

    def test_its_bound_is_not_above_its_own_time(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            if plan.lower_bound_us is None:
                assert plan.bound_class is None, "a class of schedules without the bound that holds for it"
                continue
            cost = problem.timeline(plan).recompute_us
            assert plan.bound_class is not None, "a bound without the class of schedules that it holds for"
            assert 0 <= plan.lower_bound_us <= cost * (1 + 1e-9) + 1e-6, (
                f"a bound of {plan.lower_bound_us} µs, but the plan recomputes in {cost} µs"
            )

    def test_it_plans_for_steps_without_in_place_forms(self, strategy: Strategy) -> None:
        graph = residual()
        in_place = _problem(graph, share=1.0, in_place=True).budget_bytes
        smallest = _solve(graph, 1, strategy, in_place=False)
        solution = _solve(graph, in_place, strategy, in_place=False)
        if smallest.timeline is None or smallest.timeline.peak_bytes > in_place:
            return  # it knows no plan for this budget, so it need not find one
        assert solution.status is Status.FITS, (
            f"knows a plan of {smallest.timeline.peak_bytes} bytes, but not within {in_place}: it seems to count on "
            f"in-place forms, which `problem.in_place` rules out ({solution.reason})"
        )
        assert solution.schedule is not None
        assert all(s.into is None for s in solution.schedule.steps if isinstance(s, Run))

    def test_only_the_judge_sets_the_status(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            peak = simulate(graph, lower(graph, plan, in_place=problem.in_place)).peak_bytes
            solution = solve(problem, strategy)
            if solution.plan != plan:
                continue  # cut off by the time limit: a test of its own says whether it may differ
            assert solution.status is (Status.FITS if peak <= problem.budget_bytes else Status.OVER_BUDGET)


# -- problems ---------------------------------------------------------------------------------------------------


def _problem(graph: Graph, *, share: float, in_place: bool = True) -> Problem:
    """The graph with `share` of what the unplanned step adds as its budget."""
    base = unplanned(graph, in_place=in_place)
    budget = base.start_bytes + int(share * base.above_start_bytes)
    return Problem(graph=graph, budget_bytes=budget, time_limit_s=TIME_LIMIT_S, in_place=in_place)


def _proposals(strategy: Strategy, graph: Graph) -> Iterator[tuple[Problem, Plan]]:
    """Every problem for which the strategy has a plan, with that plan."""
    for share in SHARES:
        problem = _problem(graph, share=share)
        try:
            plan = strategy.plan(problem)
        except NoPlan:
            continue
        yield problem, plan


def _solve(graph: Graph, budget_bytes: int, strategy: Strategy, *, in_place: bool) -> Solution:
    problem = Problem(graph=graph, budget_bytes=budget_bytes, time_limit_s=TIME_LIMIT_S, in_place=in_place)
    return solve(problem, strategy)


def _label(problem: Problem) -> str:
    return f"{problem.graph.name} at {problem.budget_bytes} bytes"


# -- graphs -----------------------------------------------------------------------------------------------------


@dataclass
class _Step:
    """A training step written down layer by layer; its backward and its optimizer follow by themselves."""

    name: str
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    tape: list[tuple[Op, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)  # op, inputs, saved
    round: int = 0

    def storage(self, nbytes: int, role: Role) -> int:
        self.storages.append(Storage(id=len(self.storages), nbytes=nbytes, role=role))
        return len(self.storages) - 1

    def tensor(self, name: str, nbytes: int, role: Role, producer: int | None = None) -> int:
        storage = self.storage(nbytes, role)
        self.values.append(Value(id=len(self.values), name=name, storage=storage, producer=producer))
        return len(self.values) - 1

    def op(
        self, name: str, phase: Phase, inputs: Sequence[int], sizes: Sequence[int], role: Role, **options: Any
    ) -> Op:
        op_id = len(self.ops)
        names = [name, *(f"{name}.{i}" for i in range(1, len(sizes)))]
        outputs = tuple(self.tensor(n, b, role, op_id) for n, b in zip(names, sizes, strict=False))
        fields: dict[str, Any] = {"target": name, "time_us": 1.0, "round": self.round, **options}
        self.ops.append(Op(id=op_id, name=name, phase=phase, inputs=tuple(inputs), outputs=outputs, **fields))
        return self.ops[-1]

    def layer(
        self,
        name: str,
        inputs: Sequence[int],
        *sizes: int,
        reads: Sequence[int] = (),
        saves_inputs: bool = True,
        saves_output: bool = False,
        **options: Any,
    ) -> tuple[int, ...]:
        """A forward op; `reads` are inputs without a gradient: parameters, buffers."""
        op = self.op(name, Phase.FORWARD, [*inputs, *reads], sizes, Role.ACTIVATION, **options)
        saved = (*(inputs if saves_inputs else ()), *op.outputs[0 if saves_output else 1 :])
        self.tape.append((op, tuple(inputs), saved))
        return op.outputs

    def backward(self, loss: int) -> None:
        """The backward of this round: each op reads its gradients and what its forward saved."""
        gradients: dict[int, list[int]] = {loss: []}
        for op, inputs, saved in reversed(self.tape):
            incoming = [g for v in op.outputs for g in gradients.get(v, ())]
            sizes = [self.storages[self.values[v].storage].nbytes for v in inputs]
            options: dict[str, Any] = {"target": f"{op.target}_backward", "time_us": 2 * op.time_us}
            if op.overwritable and len(incoming) == len(inputs) == 1:
                options["overwritable"] = tuple(incoming)
            reads = [*dict.fromkeys([*incoming, *saved])]
            made = self.op(f"{op.name}_bw", Phase.BACKWARD, reads, sizes, Role.GRADIENT, **options)
            for v, gradient in zip(inputs, made.outputs, strict=True):
                gradients.setdefault(v, []).append(gradient)
        self.outputs.append(loss)
        self.tape.clear()
        self.round += 1

    def graph(self, weights: Sequence[int] = ()) -> Graph:
        """The validated graph, with an optimizer op that changes `weights` at the end."""
        if weights:
            never = {"rerun": Rerun.NEVER, "never_reason": "an optimizer changes its parameters"}
            self.op("sgd", Phase.OPTIMIZER, weights, (), Role.TEMP, mutates=tuple(weights), **never)
        return Graph(
            name=self.name,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=tuple(self.storages),
            outputs=tuple(self.outputs),
        ).validate()


def chain() -> Graph:
    """Matrix products with a parameter each, every third of them never to be rerun."""
    step = _Step("chain")
    h, weights = step.tensor("x", 40, Role.INPUT), []
    for i in range(7):
        weights.append(step.tensor(f"w{i}", 24, Role.PARAM))
        never: dict[str, Any] = {"rerun": Rerun.NEVER, "never_reason": "it calls foreign code"} if i % 3 == 1 else {}
        (h,) = step.layer(f"mm{i}", [h], 100 + 10 * i, reads=[weights[-1]], time_us=3.0 + i, **never)
    (loss,) = step.layer("loss", [h], 4)
    step.backward(loss)
    return step.graph(weights)


def residual() -> Graph:
    """Two blocks of convolution, batch norm, relu and dropout with a skip, and a wide head that runs in place."""
    step = _Step("residual")
    h, weights = step.tensor("x", 128, Role.INPUT), []
    for i in range(2):
        weights.append(step.tensor(f"w{i}", 24, Role.PARAM))
        mean = step.tensor(f"mean{i}", 8, Role.BUFFER)
        (c,) = step.layer(f"conv{i}", [h], 128, reads=[weights[-1]], time_us=9.0, workspace_bytes=16)
        norm: dict[str, Any] = {"rerun": Rerun.WITHOUT_SIDE_EFFECT, "mutates": (mean,), "time_us": 2.0}
        n, _ = step.layer(f"batch_norm{i}", [c], 128, 8, reads=[mean], **norm)
        (r,) = step.layer(f"relu{i}", [n], 128, overwritable=(n,), saves_inputs=False, saves_output=True)
        state = step.storage(16, Role.TEMP)
        (d,) = step.layer(f"dropout{i}", [r], 128, rerun=Rerun.REPLAY_RNG, rng_state=state, saves_output=True)
        (h,) = step.layer(f"add{i}", [d, h], 128, overwritable=(d,), saves_inputs=False)
    (wide,) = step.layer("widen", [h], 600)
    (wide,) = step.layer("scale", [wide], 600, overwritable=(wide,), saves_inputs=False)
    (loss,) = step.layer("loss", [wide], 4, saves_inputs=False)
    step.backward(loss)
    return step.graph(weights)


def unet() -> Graph:
    """Sizes that halve on the way down, and long skips to the way up."""
    step = _Step("unet")
    h, skips = step.tensor("x", 64, Role.INPUT), []
    for i, nbytes in enumerate((256, 128, 64)):
        (h,) = step.layer(f"down{i}", [h], nbytes, time_us=4.0)
        skips.append(h)
        (h,) = step.layer(f"pool{i}", [h], nbytes // 2)
    for i, nbytes in reversed(list(enumerate((256, 128, 64)))):
        (h,) = step.layer(f"up{i}", [h, skips[i]], nbytes, time_us=4.0)
    (loss,) = step.layer("loss", [h], 4)
    step.backward(loss)
    return step.graph()


def multi_output() -> Graph:
    """Ops with several outputs that different layers read, and a second loss."""
    step = _Step("multi_output")
    x = step.tensor("x", 40, Role.INPUT)
    q, k, v = step.layer("qkv", [x], 100, 100, 100, time_us=6.0)
    (scores,) = step.layer("scores", [q, k], 200, time_us=3.0)
    mixed, attention = step.layer("attend", [scores, v], 100, 200, time_us=3.0)
    (norm,) = step.layer("norm", [mixed], 100)
    (extra,) = step.layer("extra_loss", [attention], 4)
    (loss,) = step.layer("loss", [norm, extra], 4)
    step.outputs.append(extra)
    step.backward(loss)
    return step.graph()


def accumulation() -> Graph:
    """Two rounds of forward and backward before one update."""
    step = _Step("accumulation")
    x, weights = step.tensor("x", 40, Role.INPUT), [step.tensor(f"w{i}", 24, Role.PARAM) for i in range(4)]
    for r in range(2):
        h = x
        for i, weight in enumerate(weights):
            (h,) = step.layer(f"r{r}_f{i}", [h], 100, reads=[weight], time_us=2.0)
        (loss,) = step.layer(f"r{r}_loss", [h], 4)
        step.backward(loss)
    return step.graph(weights)


def nothing_to_drop() -> Graph:
    """A step whose activations may all never be recomputed."""
    step = _Step("nothing_to_drop")
    (h,) = step.layer("foreign", [step.tensor("x", 40, Role.INPUT)], 100, rerun=Rerun.NEVER, never_reason="foreign")
    (loss,) = step.layer("loss", [h], 4)
    step.backward(loss)
    return step.graph()


GRAPHS: dict[str, Callable[[], Graph]] = {
    make.__name__: make for make in (chain, residual, unet, multi_output, accumulation, nothing_to_drop)
}
