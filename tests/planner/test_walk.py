"""The one interpreter of a schedule: its events say what every step does to memory, and when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plan import recompute_each_time, recompute_once
from planner.schedule import Free, Run, RunKind, Schedule, lower
from planner.synthetic import chain, residual_tower
from planner.walk import Freed, Ran, walk
from tests.graphs import networks_with_drops
from tests.reference import naive_bytes
from tests.small import masked, names, read_twice, split, storage, storages


@settings(max_examples=100, deadline=None)
@given(networks_with_drops(), st.sampled_from((recompute_once, recompute_each_time)), st.booleans())
def test_the_events_of_any_schedule_add_up_to_the_naive_simulator(drawn, make, in_place):
    graph, dropped = drawn
    schedule = lower(graph, make(graph, dropped), in_place=in_place)
    live, clock_us = {v.storage for v in graph.values if v.producer is None}, 0.0
    events = list(walk(graph, schedule))
    assert [event.step for event in events] == list(schedule.steps)
    assert [event.during_bytes for event in events] == naive_bytes(graph, schedule)
    for event in events:
        assert event.start_us == pytest.approx(clock_us)
        assert live.isdisjoint(event.made), "what is resident cannot be made again"
        assert live.issuperset(event.freed), "what is not resident cannot be freed"
        live = (live | set(event.made)) - set(event.freed)
        assert event.live_bytes == sum(graph.storages[s].nbytes for s in live)
        clock_us += event.op.time_us if isinstance(event, Ran) else 0.0
    assert live == graph.held_storages


def test_a_rerun_makes_what_was_dropped_and_tells_that_it_ran_before():
    graph = read_twice()
    events = list(walk(graph, lower(graph, recompute_once(graph, storages(graph, "f")))))
    (again,) = [event for event in events if isinstance(event, Ran) and event.again]
    assert (again.op.name, names(graph, again.made), again.freed) == ("f", ["f"], ())
    assert again.end_us - again.start_us == 5.0


def test_a_second_copy_is_transient_and_not_made():
    graph = split()
    events = walk(graph, lower(graph, recompute_once(graph, storages(graph, "halve.1"))))
    (again,) = [event for event in events if isinstance(event, Ran) and event.again]
    assert names(graph, again.made) == ["halve.1"]
    assert again.transient_bytes == 40


def test_a_run_in_place_frees_what_it_writes_over():
    graph = residual_tower(1)
    ran = [event for event in walk(graph, lower(graph, recompute_once(graph, ()))) if isinstance(event, Ran)]
    relu = next(event for event in ran if event.op.name == "b0_relu")
    assert relu.freed == (relu.step.into,)
    assert not any(event.freed for event in ran if event.step.into is None)


def test_a_saved_generator_state_is_made_by_the_run_that_saves_it_and_freed_by_a_step():
    graph = masked()
    state = storage(graph, "drop_mask (saved generator state)")
    events = list(walk(graph, lower(graph, recompute_once(graph, storages(graph, "drop_mask", "drop")))))
    (saving,) = [event for event in events if state in event.made]
    (freeing,) = [event for event in events if state in event.freed]
    assert isinstance(saving, Ran)
    assert saving.step.kind is RunKind.ORIGINAL_SAVING_RNG
    assert isinstance(freeing, Freed)


def test_a_schedule_that_cannot_be_carried_out_is_refused_where_it_fails():
    graph = chain(2)
    events = walk(graph, Schedule((Run(0), Free(storage(graph, "f0")), Run(1))))
    assert [type(next(events)) for _ in range(2)] == [Ran, Freed]
    with pytest.raises(PlanError, match="schedule runs 'f1' while 'f0' is not resident"):
        next(events)


def test_the_runs_of_a_schedule_are_its_steps_without_the_frees():
    assert Schedule((Run(0), Free(3), Run(1))).runs == (Run(0), Run(1))
