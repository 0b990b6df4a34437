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
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from planner import synthetic
from planner.analysis import cannot_drop
from planner.errors import NoPlan
from planner.host_link import HostLink
from planner.ir import Graph, Rerun
from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import simulate, unplanned
from planner.solve import Problem, Solution, Status, Strategy, solve
from planner.synthetic import Network, batch_norm, dropout, relu

_ASKED: dict[tuple[Strategy, str], list[tuple[Problem, Plan]]] = {}
SHARES = (0.25, 0.5, 0.75, 1.0)  # of what the unplanned step adds to its start
TIME_LIMIT_S = 10.0
LINK = HostLink.of(0.05, latency_us=0.5)  # 50 bytes a µs: about what the ops of these steps make


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
            assert len(lower(graph, plan, in_place=problem.in_place).runs) >= len(graph.ops)

    def test_two_calls_give_the_same_plan(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _ask(strategy, graph):
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
            assert solution.timeline.extra_us == 0, f"takes time for {_label(problem)}, where everything fits"
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
            runs = [run.op for run in lower(graph, plan, in_place=problem.in_place).runs]
            for op in graph.ops:
                assert op.rerun is not Rerun.NEVER or runs.count(op.id) == 1, f"{op.name!r} ran more than once"

    def test_its_bound_is_not_above_its_own_time(self, strategy: Strategy, graph: Graph) -> None:
        for problem, plan in _proposals(strategy, graph):
            if plan.lower_bound_us is None:
                assert plan.bound_class is None, "a class of schedules without the bound that holds for it"
                continue
            cost = problem.timeline(plan).extra_us
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
        assert all(run.into is None for run in solution.schedule.runs)

    def test_with_a_host_link_its_plan_can_be_carried_out_too(self, strategy: Strategy, graph: Graph) -> None:
        for host_budget_bytes in (None, 150, 0):
            problem = replace(_problem(graph, share=0.6), host_link=LINK, host_budget_bytes=host_budget_bytes)
            solution = solve(problem, strategy)  # which refuses a bound above the plan's own time
            if solution.timeline is None:
                continue
            moved = solution.timeline.host_peak_bytes
            assert host_budget_bytes is None or moved <= host_budget_bytes, f"{moved} bytes on a host with less room"

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


def _proposals(strategy: Strategy, graph: Graph) -> list[tuple[Problem, Plan]]:
    """Every problem for which the strategy has a plan, with that plan; asked once for all tests that judge them."""
    key = (strategy, graph.name)
    if key not in _ASKED:
        _ASKED[key] = list(_ask(strategy, graph))
    return _ASKED[key]


def _ask(strategy: Strategy, graph: Graph) -> Iterator[tuple[Problem, Plan]]:
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


def chain() -> Graph:
    """Matrix products with a parameter each, every third of them never to be rerun."""
    net = Network("chain", input_bytes=40)
    h = net.x
    for i in range(7):
        rerun = Rerun.NEVER if i % 3 == 1 else Rerun.FREELY
        h = net.layer(f"mm{i}", [h], 100 + 10 * i, param_bytes=24, time_us=3.0 + i, rerun=rerun)
    return net.graph(net.layer("loss", [h], 4))


def residual() -> Graph:
    """Two blocks of convolution, batch norm, relu and dropout with a skip, and a wide head that runs in place."""
    net = Network("residual", input_bytes=128)
    h = net.x
    for i in range(2):
        conv = net.layer(f"conv{i}", [h], 128, param_bytes=24, time_us=9.0, workspace_bytes=16)
        r = relu(net, f"relu{i}", batch_norm(net, f"norm{i}", conv, 128), 128, time_us=1.0)
        d = dropout(net, f"dropout{i}", r, 128)
        h = net.layer(f"add{i}", [d, h], 128, overwritable=(d,), saves_input=False)
    wide = net.layer("widen", [h], 600)
    wide = net.layer("scale", [wide], 600, overwritable=(wide,), saves_input=False, backward_in_place=True)
    return net.graph(net.layer("loss", [wide], 4, saves_input=False))


def unet() -> Graph:
    """Sizes that halve on the way down, and long skips to the way up."""
    return synthetic.unet(3)


def multi_output() -> Graph:
    """Ops with several outputs that different layers read, and a second loss."""
    net = Network("multi_output", input_bytes=40)
    q, k, v = net.build.op("qkv", [net.x], [100, 100, 100], time_us=6.0)
    scores = net.layer("scores", [q, k], 200, time_us=3.0)
    mixed = net.layer("attend", [scores, v], 100, extra_sizes=(200,), time_us=3.0)
    attention = net.build.ops[-1].outputs[1]
    norm, extra = net.layer("norm", [mixed], 100), net.layer("extra_loss", [attention], 4)
    net.build.outputs.append(extra)
    return net.graph(net.layer("loss", [norm, extra], 4))


def accumulation() -> Graph:
    """Two rounds of forward and backward before one update."""
    return synthetic.accumulation(2, 4)


def nothing_to_drop() -> Graph:
    """A step whose activations may all never be recomputed."""
    net = Network("nothing_to_drop", input_bytes=40)
    return net.graph(net.layer("loss", [net.layer("foreign", [net.x], 100, rerun=Rerun.NEVER)], 4))


GRAPHS: dict[str, Callable[[], Graph]] = {
    make.__name__: make for make in (chain, residual, unet, multi_output, accumulation, nothing_to_drop)
}
