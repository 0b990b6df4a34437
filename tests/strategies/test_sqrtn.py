"""`sqrtn`: where it cuts, and what it keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis import candidates, temporaries
from planner.errors import NoPlan, StrategyError
from planner.ir import Graph, Phase
from planner.plan import Plan
from planner.schedule import Run, RunKind, lower
from planner.solve import Problem, Status, solve
from planner.synthetic import Network, accumulation, chain, residual_tower, unet
from strategies.sqrtn import SqrtN, _Forward
from tests.graphs import networks
from tests.small import names


def dropped(graph: Graph, **options) -> list[str]:
    return names(graph, solve(Problem(graph=graph, budget_bytes=1), SqrtN(**options)).dropped)


def test_equal_layers_are_cut_into_equal_segments_and_only_cuts_and_the_last_segment_are_kept():
    # 9 layers, 3 segments: f0 f1 [f2] | f3 f4 [f5] | f6 f7 f8, whose backward comes first.
    assert dropped(chain(9), segments=3) == ["f0", "f1", "f3", "f4"]


def test_segments_are_weighed_by_bytes():
    net = Network("heavy-start")
    x = net.x
    for i, nbytes in enumerate((400, 400, 100, 100, 100, 100)):
        x = net.layer(f"f{i}", [x], nbytes)
    # Half of the 1200 bytes are reached within f1, so the cut lies behind it, not behind f2.
    assert dropped(net.graph(net.layer("loss", [x], 1)), segments=2, snap=False) == ["f0"]


def uneven() -> Graph:
    """Six layers of 100 bytes, with a narrow one beside the middle."""
    net = Network("uneven")
    x = net.x
    for i, nbytes in enumerate((100, 100, 100, 100, 10, 100, 100)):
        x = net.layer(f"f{i}", [x], nbytes)
    return net.graph(net.layer("loss", [x], 1))


def test_a_cut_snaps_to_where_the_fewest_bytes_cross():
    # 610 bytes: the middle falls into f3; one step further only the 10 bytes of f4 cross.
    assert dropped(uneven(), segments=2, snap=False) == ["f0", "f1", "f2"]
    assert dropped(uneven(), segments=2) == ["f0", "f1", "f2", "f3"]


def test_a_skip_that_crosses_a_cut_is_kept():
    graph = unet(3)
    gone = dropped(graph, segments=3, snap=False)
    assert "pool0" in gone
    # The skips are read again on the way up, behind the cuts.
    assert not {"act0", "act1", "act2"} & set(gone)


def test_one_segment_is_the_whole_forward_and_drops_nothing():
    assert dropped(chain(9), segments=1) == []


@pytest.mark.parametrize("snap", [True, False])
def test_no_cut_lies_behind_the_last_segment_however_many_are_asked_for(snap):
    # Every layer is followed by a cut, the last one before the loss included: nothing is left to drop.
    assert dropped(chain(4), segments=50, snap=snap) == []


@pytest.mark.parametrize("snap", [True, False])
def test_a_heavy_end_is_no_reason_to_drop_the_last_segment(snap):
    net = Network("heavy-end")
    x = net.x
    for i, nbytes in enumerate((10, 10, 10, 10, 1000)):
        x = net.layer(f"f{i}", [x], nbytes)
    graph = net.graph(net.layer("loss", [x], 1))
    assert "f4" not in dropped(graph, segments=2, snap=snap)


def test_out_of_time_it_returns_the_square_root_s_plan_and_says_so():
    graph = chain(64)
    tight = Problem(graph=graph, budget_bytes=graph.start_bytes + 1, time_limit_s=0.0)
    plan = SqrtN().plan(tight)
    assert plan.cut_off
    assert replace(plan, cut_off=False) == SqrtN(segments=8).plan(tight)


def test_segments_that_take_longer_than_is_of_use_are_left_out():
    graph = chain(64)
    problem = Problem(graph=graph, budget_bytes=graph.start_bytes + 3000)
    found = solve(problem, SqrtN())
    limited = problem.limited(10.0, most_recompute_us=found.timeline.recompute_us)
    assert SqrtN().plan(limited) == found.plan
    with pytest.raises(NoPlan):
        SqrtN(segments=8).plan(problem.limited(10.0, most_recompute_us=1.0))


@pytest.mark.parametrize("segments", [0, -1])
def test_less_than_one_segment_is_refused(segments):
    with pytest.raises(StrategyError, match=f"segments={segments}: there must be at least one"):
        SqrtN(segments=segments)


def test_every_round_of_an_accumulation_has_segments_of_its_own():
    gone = dropped(accumulation(2, 9), segments=3)
    assert gone == [f"r{r}_f{i}" for r in (0, 1) for i in (0, 1, 3, 4)]


def test_a_chain_of_n_layers_comes_down_to_about_two_roots_of_n():
    graph = chain(64)
    solution = solve(Problem(graph=graph, budget_bytes=1), SqrtN())
    # 64 layers of 100 bytes unplanned; √64 segments leave 8 cuts and one segment of 8, and a few gradients.
    assert solution.timeline.peak_bytes < 20 * 100
    assert solution.timeline.reruns < 64


def test_where_everything_fits_nothing_is_dropped():
    graph = residual_tower(2)
    peak = Problem(graph=graph, budget_bytes=1).unplanned.peak_bytes
    assert SqrtN().plan(Problem(graph=graph, budget_bytes=peak)) == Plan()
    assert SqrtN().plan(Problem(graph=graph, budget_bytes=peak - 1)) != Plan()


@settings(max_examples=40, deadline=None)
@given(networks(), st.floats(0, 1), st.booleans(), st.integers(1, 4))
def test_the_search_is_never_worse_than_a_number_of_segments_around_the_square_root(graph, share, snap, segments):
    base = Problem(graph=graph, budget_bytes=1).unplanned
    problem = Problem(graph=graph, budget_bytes=max(1, int(share * base.peak_bytes)))
    assert standing(problem, SqrtN(snap=snap)) <= standing(problem, SqrtN(segments=segments, snap=snap))


def standing(problem: Problem, strategy: SqrtN) -> tuple[bool, float, float]:
    """What fits comes first, the cheapest leading; then the smallest peaks, the cheapest of equals leading."""
    solution = solve(problem, strategy)
    peak, cost = solution.timeline.peak_bytes, solution.timeline.recompute_us
    return (False, cost, peak) if solution.status is Status.FITS else (True, peak, cost)


@settings(max_examples=60, deadline=None)
@given(networks(), st.integers(1, 6), st.booleans())
def test_what_crosses_a_cut_and_the_last_segment_are_kept_and_all_else_is_dropped(graph, segments, snap):
    (plan,) = _Forward(graph).plans([segments], snap=snap)
    gone = {e.storage for e in plan.evictions}
    for number, line in enumerate(_Forward(graph).rounds):
        forward = [op.id for op in graph.ops if op.phase is Phase.FORWARD and op.round == number]
        cuts = [forward[p] for p in line.cuts(segments, snap=snap)]
        assert len(cuts) < max(segments, 2)
        for s in (*candidates(graph), *temporaries(graph)):
            if graph.maker[s] not in forward:
                continue
            last = max((r for r in graph.readers[s] if r in forward), default=graph.maker[s])
            crosses = any(graph.maker[s] <= cut < last for cut in cuts)
            in_last_segment = all(graph.maker[s] > cut for cut in cuts)
            assert (s in gone) is not (crosses or in_last_segment)


def test_a_segment_is_recomputed_as_a_whole_before_its_backward():
    graph = chain(9)
    problem = Problem(graph=graph, budget_bytes=1)
    steps = lower(graph, SqrtN(segments=3).plan(problem)).steps
    runs = [(graph.ops[s.op].name, s.kind is RunKind.RERUN) for s in steps if isinstance(s, Run)]
    backward = runs[runs.index(("loss_bw", False)) :]
    assert [name for name, _ in backward] == [
        *("loss_bw", "f8_bw", "f7_bw", "f6_bw"),
        *("f3", "f4", "f5_bw", "f4_bw", "f3_bw"),
        *("f0", "f1", "f2_bw", "f1_bw", "f0_bw"),
    ]
