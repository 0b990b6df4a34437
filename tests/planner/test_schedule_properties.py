"""Properties of lowering and simulation on random networks, against oracles that share none of their code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis import candidates, temporaries
from planner.errors import PlanError
from planner.incremental import Incremental
from planner.ir import Graph, Rerun
from planner.plan import Eviction, Plan, recompute_each_time, recompute_once
from planner.schedule import Run, RunKind, lower
from planner.simulator import bytes_by_role, simulate
from tests.graphs import networks, networks_with_drops
from tests.reference import Execution, naive_bytes, unplanned

MAKERS = (recompute_once, recompute_each_time)
many = settings(max_examples=100, deadline=None)


@many
@given(networks_with_drops(), st.sampled_from(MAKERS), st.booleans())
def test_a_lowered_schedule_computes_the_terms_of_the_original(drawn, make, in_place):
    graph, dropped = drawn
    expected = Execution(graph).run(unplanned(graph, in_place=in_place))
    actual = Execution(graph).run(lower(graph, make(graph, dropped), in_place=in_place))
    assert actual.original == expected.original
    assert actual.version == expected.version
    assert all(terms == expected.original[op] for op, terms in actual.rerun_terms)
    assert [actual.terms[v] for v in graph.outputs] == [expected.terms[v] for v in graph.outputs]


@many
@given(networks_with_drops(), st.sampled_from(MAKERS), st.booleans())
def test_the_simulator_equals_the_naive_one(drawn, make, in_place):
    graph, dropped = drawn
    schedule = lower(graph, make(graph, dropped), in_place=in_place)
    timeline = simulate(graph, schedule)
    naive = naive_bytes(graph, schedule)
    assert list(timeline.bytes_at) == naive
    assert naive[-1] == sum(graph.storages[s].nbytes for s in graph.held_storages), "something was left behind"
    assert timeline.peak_bytes == max(naive) == timeline.bytes_at[timeline.peak_step]
    assert sum(nbytes for _, nbytes in timeline.peak_by_role) == timeline.peak_bytes
    series = bytes_by_role(graph, schedule)
    assert [sum(column) for column in zip(*series.values(), strict=True)] == naive


@many
@given(networks_with_drops(), st.sampled_from(MAKERS))
def test_total_time_is_base_plus_recompute_and_what_never_reruns_runs_once(drawn, make):
    graph, dropped = drawn
    schedule = lower(graph, make(graph, dropped))
    timeline = simulate(graph, schedule)
    runs = [s for s in schedule.steps if isinstance(s, Run)]
    reruns = [s.op for s in runs if s.kind is RunKind.RERUN]
    assert timeline.base_us == pytest.approx(graph.time_us)
    assert timeline.recompute_us == pytest.approx(sum(graph.ops[op].time_us for op in reruns))
    assert [s.op for s in runs if s.kind is not RunKind.RERUN] == list(range(len(graph.ops)))
    assert all(graph.ops[op].rerun is not Rerun.NEVER for op in reruns)


@many
@given(networks_with_drops())
def test_recompute_once_reruns_no_op_twice(drawn):
    graph, dropped = drawn
    steps = lower(graph, recompute_once(graph, dropped)).steps
    reruns = [s.op for s in steps if isinstance(s, Run) and s.kind is RunKind.RERUN]
    assert len(reruns) == len(set(reruns))


@many
@given(networks_with_drops(), st.booleans(), st.data())
def test_the_incremental_form_equals_lower_and_simulate_after_every_change(drawn, in_place, data):
    graph, dropped = drawn
    state = Incremental(graph, dropped, in_place=in_place)
    free = (*candidates(graph), *temporaries(graph))
    for _ in range(4):
        timeline = simulate(graph, lower(graph, state.plan(), in_place=in_place))
        assert state.peak()[0] == timeline.peak_bytes
        assert state.recompute_us == pytest.approx(timeline.recompute_us)
        if not free:
            return
        storage = data.draw(st.sampled_from(free))
        (state.keep if state.is_dropped(storage) else state.drop)(storage)


@st.composite
def any_evictions(draw, graph: Graph) -> Plan:
    """One or two evictions of any droppable storages, anywhere in the step."""
    evictions = []
    for storage in (*candidates(graph), *temporaries(graph)):
        at = graph.maker[storage]
        for _ in range(draw(st.integers(0, 2))):
            after = draw(st.integers(at, len(graph.ops) - 1))
            before = draw(st.one_of(st.none(), st.integers(after + 1, len(graph.ops)))) if after + 1 else None
            if before == len(graph.ops):
                before = None
            evictions.append(Eviction(storage=storage, free_after=after, restore_before=before))
            if before is None:
                break
            at = before
    return Plan(evictions=tuple(evictions))


@many
@given(networks(max_layers=6), st.data())
def test_any_evictions_are_refused_by_name_or_carried_out_exactly(graph, data):
    plan = data.draw(any_evictions(graph))
    try:
        schedule = lower(graph, plan)
    except PlanError as refusal:
        message = str(refusal)
        schedule = None
    if schedule is None:
        assert any(op.name in message for op in graph.ops)
        return
    expected = Execution(graph).run(unplanned(graph))
    actual = Execution(graph).run(schedule)
    assert actual.original == expected.original
    assert actual.version == expected.version
    assert list(simulate(graph, schedule).bytes_at) == naive_bytes(graph, schedule)
