"""The judge's numbers on steps small enough to add up by hand."""

from __future__ import annotations

import pytest

from planner.analysis import candidates
from planner.errors import PlanError
from planner.ir import Graph, Role
from planner.plan import Plan, recompute_once
from planner.schedule import Free, Run, RunKind, Schedule, lower
from planner.simulator import bytes_by_role, simulate
from planner.synthetic import Builder, chain, residual_tower
from tests.small import BACKWARD, eviction, masked, op, read_twice, split, storage, storages


def simulated(graph: Graph, plan: Plan, **options: bool):
    return simulate(graph, lower(graph, plan, **options))


def bytes_during(graph: Graph, plan: Plan, name: str, kind: RunKind = RunKind.ORIGINAL, **options: bool) -> int:
    """The bytes live while the op of that name runs."""
    schedule = lower(graph, plan, **options)
    at = next(i for i, s in enumerate(schedule.steps)
              if isinstance(s, Run) and graph.ops[s.op].name == name and s.kind is kind)  # fmt: skip
    return simulate(graph, schedule).bytes_at[at]


def test_the_unplanned_step_costs_what_a_hand_adds_up():
    timeline = simulated(read_twice(), Plan())
    # x 10; f 100, g 60, loss 1, loss_bw 60, then g dies; g_bw 30, then loss_bw dies; mid_bw 200, ...
    assert timeline.bytes_at == (110, 170, 171, 231, 171, 201, 141, 341, 311, 321, 221, 21, 11)
    assert (timeline.start_bytes, timeline.peak_bytes, timeline.peak_step) == (10, 341, 7)
    assert timeline.above_start_bytes == 331
    assert timeline.time_us == timeline.base_us == 5 + 2 + 1 + 4 * 1
    assert (timeline.recompute_us, timeline.reruns, timeline.overhead) == (0, 0, 0)


def test_a_planned_step_costs_what_a_hand_adds_up():
    graph = read_twice()
    twice = Plan(evictions=(eviction(graph, "f", "g", "g_bw"), eviction(graph, "f", "g_bw", "f_bw")))
    timeline = simulated(graph, twice)
    assert timeline.bytes_at == (110, 170, 70, 71, 131, 71, 171, 201, 101, 41, 241, 211, 311, 321, 221, 21, 11)
    assert (timeline.peak_bytes, timeline.peak_step) == (321, 13)
    assert (timeline.recompute_us, timeline.reruns) == (10.0, 2)
    assert (timeline.time_us, timeline.base_us) == (22.0, 12.0)
    assert timeline.overhead == pytest.approx(10 / 12)


def test_a_peak_reached_twice_counts_from_its_first_step():
    b = Builder("even")
    f = b.one("f", [b.input("x", 10)], 10)
    b.one("g", [f], 10)
    b.one("h", [f], 10)
    timeline = simulated(b.build(), Plan())
    assert (timeline.peak_bytes, timeline.peak_step) == (30, 1)


def test_the_peak_is_split_by_role_and_workspaces_are_temporary():
    b = Builder("roles")
    x, w = b.input("x", 10), b.input("w", 7, Role.PARAM)
    f = b.one("f", [x, w], 100, workspace_bytes=5)
    b.outputs.append(f)
    b.one("f_bw", [f, w], 50, workspace_bytes=3, **BACKWARD)
    graph = b.build()
    timeline = simulated(graph, Plan())
    assert timeline.peak_bytes == 10 + 7 + 100 + 50 + 3
    assert dict(timeline.peak_by_role) == {
        Role.INPUT: 10, Role.PARAM: 7, Role.ACTIVATION: 100, Role.GRADIENT: 50, Role.TEMP: 3,
    }  # fmt: skip
    series = bytes_by_role(graph, lower(graph, Plan()))
    assert series[Role.TEMP] == [5, 3, 0]
    assert series[Role.GRADIENT] == [0, 50, 0]


def test_a_saved_generator_state_counts_from_the_first_run_to_the_last_replay():
    graph = masked()
    kept, dropped = Plan(), recompute_once(graph, storages(graph, "drop_mask", "drop"))
    state = graph.storages[storage(graph, "drop_mask (saved generator state)")].nbytes
    assert state == 16
    saving = bytes_during(graph, dropped, "drop_mask", RunKind.ORIGINAL_SAVING_RNG)
    assert saving == bytes_during(graph, kept, "drop_mask") + state
    # During loss x, g, loss and the state are live; after the replay the state is gone.
    assert bytes_during(graph, dropped, "loss") == 4 + 100 + 1 + state
    # During g_bw x, loss, loss_bw's gradient, mask and drop are live, and its own gradient.
    assert bytes_during(graph, dropped, "g_bw") == 4 + 1 + 100 + 100 + 100 + 100


def test_a_second_copy_of_what_is_resident_counts_while_the_op_runs():
    graph = split()
    plan = recompute_once(graph, storages(graph, "halve.1"))
    # x 4, halve.0 40 (kept), loss 1, two gradients of 20; the rerun makes halve.1 (50) and halve.0 (40) anew.
    assert bytes_during(graph, plan, "halve", RunKind.RERUN) == 4 + 40 + 1 + 20 + 20 + 50 + 40
    assert bytes_during(graph, plan, "right_bw") == 4 + 40 + 1 + 20 + 20 + 50 + 50


def test_an_in_place_form_needs_no_second_tensor():
    graph = residual_tower(1)
    on, off = (bytes_during(graph, Plan(), "b0_relu", in_place=flag) for flag in (True, False))
    assert off - on == 100


def test_a_rerun_without_side_effect_costs_time_and_no_buffer():
    graph = residual_tower(1)
    timeline = simulated(graph, recompute_once(graph, storages(graph, "b0_norm.1")))
    assert (timeline.recompute_us, timeline.reruns) == (2.0, 1)


def test_a_run_that_lacks_an_input_is_refused_by_name():
    with pytest.raises(PlanError, match="schedule runs 'f1' while 'f0' is not resident"):
        simulate(chain(2), Schedule((Run(1),)))


def test_a_free_of_what_is_not_there_is_refused_by_name():
    graph = chain(2)
    freed_twice = Schedule((Run(0), Free(storage(graph, "f0")), Free(storage(graph, "f0"))))
    with pytest.raises(PlanError, match="schedule frees 'f0', which is not resident"):
        simulate(graph, freed_twice)


def test_a_replay_without_a_saved_state_is_refused_by_name():
    graph = masked()
    mask = op(graph, "drop_mask")
    with pytest.raises(PlanError, match=r"schedule runs 'drop_mask' while .*saved generator state.* is not resident"):
        simulate(graph, Schedule((Run(0), Run(mask), Run(mask, None, RunKind.RERUN))))


def test_an_empty_schedule_costs_what_is_live_before_the_step():
    graph = chain(2, param_bytes=8)
    timeline = simulate(graph, Schedule(()))
    assert (timeline.peak_bytes, timeline.time_us) == (graph.start_bytes, 0)
    assert timeline.overhead == 0


def test_dropping_everything_in_a_chain_saves_nothing_when_one_clone_needs_them_all():
    graph = chain(4)
    unplanned, planned = simulated(graph, Plan()), simulated(graph, recompute_once(graph, candidates(graph)))
    assert planned.peak_bytes == unplanned.peak_bytes
    assert planned.recompute_us == 4.0
