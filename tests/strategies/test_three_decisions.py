"""Keep, recompute or move: never worse than without the link, and bounds that no plan is below."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from planner.analysis import candidates, floor, movable, temporaries
from planner.host_link import HostLink
from planner.incremental import Incremental
from planner.ir import Graph, Rerun
from planner.placement import Move, Placement, place
from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import Timeline, simulate
from planner.solve import Problem, Status, solve
from planner.synthetic import Network, accumulation, chain, residual_tower, resnet_like, transformer
from strategies.ilp import joint
from strategies.ilp import windows as window_module
from strategies.ilp.joint import WITH_LINK, JointSearch
from strategies.ilp.search import Ilp, Search
from strategies.ilp.shared_work import Work
from strategies.ilp.solvers import SolverName, solve_model
from strategies.ilp.windows import WINDOW, fixed_outside, windows
from strategies.mutwo.greedy import MuTwo
from strategies.mutwo.paper import _resident_bytes, paper_picks
from strategies.mutwo.swapping import Swapping
from tests.graphs import links, networks
from tests.small import op, storage

LINK = HostLink.of(0.05, latency_us=0.5)
GRAPHS = (residual_tower(3), transformer(2), accumulation(2, 4))  # of which all is known in a second


def at(graph: Graph, share: float, link: HostLink | None = LINK, **more: object) -> Problem:
    """A budget between the least that any schedule needs, with the host too, and what the step takes as it is."""
    low, high = floor(graph, moving=True).nbytes, Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    return Problem(graph=graph, budget_bytes=low + int(share * (high - low)), host_link=link, **more)


def rank(solution) -> tuple:
    fits = solution.status is Status.FITS
    return (not fits, solution.timeline.extra_us if fits else solution.timeline.peak_bytes)


@pytest.mark.parametrize("spec", ["mutwo", "ilp", "auto:seconds=30", "sqrtn", "cheap"])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda g: g.name)
def test_a_link_is_never_worse_than_none(graph, spec):
    for share in (0.3, 0.7):
        without = solve(at(graph, share, None, time_limit_s=30.0), strategies.make(spec))
        for link in (HostLink.of(1e-6), LINK):
            found = solve(at(graph, share, link, time_limit_s=30.0), strategies.make(spec))
            assert rank(found) <= rank(without)
            assert not found.plan.cut_off, "with so much time it is no question of how fast the machine is"


def test_a_proof_that_nothing_without_the_link_is_better_saves_the_search_for_it(monkeypatch):
    graph, asked = residual_tower(6), []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda search: asked.append(search) or run(search))
    found = solve(at(graph, 0.5, HostLink.of(10.0, latency_us=0.0)), Ilp())
    assert found.moved
    (search,) = asked
    assert search.best.who == WITH_LINK
    assert search.bound_us >= found.timeline.extra_us


def test_a_window_decides_its_own_storages_anew_and_leaves_the_others_as_they_are():
    graph = resnet_like((3, 4, 6, 3))
    problem = at(graph, 0.3, HostLink.of(12))
    search = JointSearch(problem, solver=SolverName.ORTOOLS, gap=0.005, seeds=True)
    choice = Swapping(problem, deadline=math.inf).run()
    search.rows.refine(choice.state, choice.placed, problem.budget_bytes)
    program = search._program(search.rows)
    some, *others = windows(graph, program.keep)
    assert set().union(some, *others) == set(program.keep)
    assert all(len(window) <= WINDOW for window in others)
    answer = solve_model(
        fixed_outside(program, program.at(problem.budget_bytes), choice, some),
        SolverName.ORTOOLS,
        time_limit_s=60.0,
        gap=0.01,
    )
    kept = program.kept(answer.point)
    assert all((s in kept) != choice.state.is_dropped(s) for s in set(program.keep) - some)


def test_a_busy_machine_gets_the_same_plan_and_windows_do_not_make_it_worse(monkeypatch):
    problem = at(resnet_like((2, 2, 2, 2)), 0.4, HostLink.of(1), time_limit_s=600.0)
    for module in (joint, window_module):
        monkeypatch.setattr(module, "WINDOW", 20)
    monkeypatch.setattr(joint, "LARGE_CELLS", 0)
    monkeypatch.setattr(joint, "WINDOWS", 2)
    around, asked = JointSearch._around, []
    monkeypatch.setattr(JointSearch, "_around", lambda search, *of: asked.append(of) or around(search, *of))
    plans = [Ilp(effort=0.5).plan(problem)]
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 7 * clock())  # everything seems to take seven times as long
    plans.append(Ilp(effort=0.5).plan(problem))
    assert plans[0] == plans[1]
    assert len(asked) == 2, "one window a plan"
    assert not plans[0].cut_off
    mine, greedy = problem.timeline(plans[0]), problem.timeline(MuTwo().plan(problem))
    assert problem.fits(mine)
    assert mine.extra_us <= greedy.extra_us


@pytest.mark.parametrize("spec", ["mutwo", "ilp", "auto"])
def test_a_fast_link_costs_next_to_nothing_where_recomputing_costs_time(spec):
    graph = residual_tower(6)
    without, with_link = (
        solve(at(graph, 0.5, link), strategies.make(spec)) for link in (None, HostLink.of(10.0, latency_us=0.0))
    )
    assert with_link.status is Status.FITS
    assert with_link.moved
    assert with_link.timeline.extra_us < 0.1 * without.timeline.extra_us


def foreign() -> Graph:
    net = Network("foreign")
    h = net.x
    for i in range(4):
        h = net.layer(f"f{i}", [h], 100, time_us=20.0, rerun=Rerun.NEVER)
    return net.graph(net.layer("loss", [h], 4))


@pytest.mark.parametrize("spec", ["mutwo", "ilp", "auto", "offload_only"])
def test_what_may_never_be_recomputed_fits_by_moving(spec):
    problem = at(foreign(), 0.4)
    assert solve(replace(problem, host_link=None), strategies.make("ilp")).status is not Status.FITS
    assert solve(problem, strategies.make(spec)).status is Status.FITS


@pytest.mark.parametrize("spec", ["mutwo", "ilp", "offload_only"])
def test_a_host_without_room_gets_nothing(spec):
    graph = residual_tower(4)
    problem = at(graph, 0.6, host_budget_bytes=0)
    solution = solve(problem, strategies.make(spec))
    assert solution.moved == ()
    assert solution.timeline.host_peak_bytes == 0


@pytest.mark.parametrize("graph", [residual_tower(12), transformer(6)], ids=lambda g: g.name)
def test_both_together_fit_wherever_moving_alone_does_and_take_no_longer(graph):
    for share in (0.15, 0.25, 0.3):
        problem = at(graph, share, HostLink.of(1.0, latency_us=10.0))
        assert rank(solve(problem, MuTwo())) <= rank(solve(problem, strategies.make("offload_only")))


def test_moving_alone_recomputes_nothing():
    solution = solve(at(residual_tower(4), 0.5), strategies.make("offload_only"))
    assert solution.moved
    assert solution.timeline.recompute_us == 0
    assert "no host link" in strategies.make("offload_only").plan(at(residual_tower(4), 0.5, None)).note


# -- the bound ----------------------------------------------------------------------------------------------------


def any_plan(graph: Graph, problem: Problem, small: set[int], random: Random) -> Timeline:
    """A random plan of the class that the bound is for, with boundaries anywhere or well placed."""
    state = Incremental(
        graph,
        [s for s in candidates(graph) if s not in small and random.random() < 0.4],
        kept=[s for s in temporaries(graph) if s in small or random.random() < 0.3],
    )
    moved = [s for s in movable(graph) if not state.is_dropped(s) and random.random() < 0.5]
    assert problem.host_link is not None
    if random.random() < 0.5:
        placed = place(state, moved, budget_bytes=problem.budget_bytes, link=problem.host_link)
    else:
        placed = anywhere(state, moved, random)
    return simulate(graph, lower(graph, placed.added_to(state.plan()), link=problem.host_link))


def anywhere(state: Incremental, moved: list[int], random: Random) -> Placement:
    moves = []
    for s in moved:
        after, need = state.freed_after(s), state.need(s)
        if need - after < 2:
            continue
        gone = random.randint(after + 1, need)
        nbytes = state.graph.storages[s].nbytes
        moves.append(Move(s, nbytes, after, need, gone, random.randint(gone, need)))
    return Placement(moves=tuple(moves), stage_bytes=state.stage_bytes(), stall_us=0.0, recompute_us=0.0, stalls={})


@settings(max_examples=40, deadline=None)
@given(networks(max_layers=6), links(), st.floats(0.1, 0.95), st.integers(0, 2**20))
def test_no_plan_of_its_class_is_below_the_bound_or_fits_where_nothing_can(graph, link, share, seed):
    problem = at(graph, share, link)
    if problem.unplanned.peak_bytes <= problem.budget_bytes:
        return
    plan = Ilp().plan(problem)
    small, random = set(Work(problem).reduction.small), Random(seed)
    for _ in range(60):
        timeline = any_plan(graph, problem, small, random)
        if timeline.peak_bytes > problem.budget_bytes:
            continue
        assert "proven: nothing" not in plan.note
        assert timeline.extra_us >= (plan.lower_bound_us or 0.0) * (1 - 1e-9) - 1e-6


def every_plan(graph: Graph, problem: Problem):
    """Every set of dropped activations with up to two others moved, between all boundaries."""
    free = candidates(graph)
    for number in range(2 ** len(free)):
        state = Incremental(graph, [s for i, s in enumerate(free) if number >> i & 1])
        kept = [s for s in movable(graph) if not state.is_dropped(s)]
        for count in (0, 1, 2):
            for chosen in combinations(kept, count):
                yield from every_boundary(state, chosen)


def every_boundary(state: Incremental, chosen: tuple[int, ...]):
    options = [()]
    for s in chosen:
        after, need, nbytes = state.freed_after(s), state.need(s), state.graph.storages[s].nbytes
        gaps = [(g, b) for g in range(after + 1, need) for b in range(g + 1, need + 1)]
        options = [(*o, Move(s, nbytes, after, need, *gap)) for o in options for gap in gaps]
    for moves in options:
        yield state, Placement(moves=moves, stage_bytes=state.stage_bytes(), stall_us=0.0, recompute_us=0.0, stalls={})


@pytest.mark.parametrize("gb_per_s", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("share", [0.15, 0.5])
def test_the_optimum_of_a_small_chain_is_that_of_brute_force(gb_per_s, share):
    graph, link = chain(3), HostLink.of(gb_per_s, latency_us=0.5)
    problem = at(graph, share, link)
    best = min(
        timeline.extra_us
        for state, placed in every_plan(graph, problem)
        if (timeline := simulate(graph, lower(graph, placed.added_to(state.plan()), link=link))).peak_bytes
        <= problem.budget_bytes
    )
    for strategy in (Ilp(), strategies.make("auto")):
        solution = solve(problem, strategy)
        assert solution.timeline.extra_us == pytest.approx(best)
        assert solution.plan.lower_bound_us <= best + 1e-6
        assert solution.gap <= 0.01


# -- the paper's own ----------------------------------------------------------------------------------------------


def line(layers: str) -> Graph:
    """Layers of 100 bytes and 10 µs each, and their backward of 20 µs."""
    net = Network("line")
    h = net.x
    for name in layers:
        h = net.layer(name, [h], 100, time_us=10.0)
    return net.graph(net.layer("loss", [h], 1, time_us=10.0))


def test_a_swap_is_prompted_just_early_enough_to_be_hidden():
    graph = line("abcdef")
    peak = max(_resident_bytes(graph))
    for latency_us, prompt in ((5.0, "c_bw"), (15.0, "d_bw")):
        picks = paper_picks(graph, peak - 50, HostLink.of(0.01, latency_us=latency_us))  # 10 µs for 100 bytes
        # a idles longest, until b_bw; c_bw, of 20 µs, hides a copy of 15, and of 25 with d_bw.
        assert (picks.dropped, picks.prompts) == ((), {storage(graph, "a"): op(graph, prompt)})


def test_a_prefetch_inside_the_peak_s_interval_overlaps_with_nothing():
    graph = line("abc")
    # Algorithm G is at its largest, 405 bytes, up to c_bw; a is wanted by b_bw. The copy takes 5 µs, recomputing a 10.
    picks = paper_picks(graph, 400, HostLink.of(0.02, latency_us=0.0))
    assert picks.dropped == ()
    # Once it is picked there is no such interval any more, and its prompt moves.
    assert picks.prompts == {storage(graph, "a"): op(graph, "c_bw")}
    assert paper_picks(graph, 400, HostLink.of(0.01, latency_us=0.0)).prompts == {}


def test_a_link_too_slow_to_hide_anything_leaves_the_paper_recomputing():
    graph = line("abc")
    slow = paper_picks(graph, 300, HostLink.of(1e-6))
    assert slow.prompts == {}
    assert slow.dropped == paper_picks(graph, 300).dropped != ()


@settings(max_examples=60, deadline=None)
@given(networks(max_layers=10), links(), st.floats(0.1, 0.95))
def test_what_the_paper_proposes_can_always_be_carried_out(graph, link, share):
    solution = solve(at(graph, share, link), MuTwo(faithful=True))
    assert solution.timeline is not None


def test_the_paper_s_estimates_are_judged_like_any_other_plan():
    graph = residual_tower(6)
    problem = at(graph, 0.5)
    faithful, exact = solve(problem, MuTwo(faithful=True)), solve(problem, MuTwo())
    assert exact.status is Status.FITS
    assert rank(exact) <= rank(faithful)
    assert faithful.plan != Plan()
    assert storage(graph, "stem") in movable(graph)
