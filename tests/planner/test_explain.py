"""A reason for every storage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from planner.analysis import candidates
from planner.explain import Choice, Decision, explain
from planner.ir import Graph, Role
from planner.plan import Plan, recompute_once
from planner.schedule import lower
from planner.synthetic import residual_tower
from tests.graphs import networks_with_drops
from tests.small import eviction, foreign_view, masked, read_twice, storages, updated_between


def explained(graph: Graph, plan: Plan) -> dict[str, Decision]:
    return {d.name: d for d in explain(graph, plan, lower(graph, plan))}


@settings(max_examples=40, deadline=None)
@given(networks_with_drops())
def test_every_storage_has_a_decision_with_a_reason_and_its_numbers(drawn):
    graph, dropped = drawn
    plan = recompute_once(graph, dropped)
    decisions = explain(graph, plan, lower(graph, plan))
    assert [d.storage for d in decisions] == [s.id for s in graph.storages]
    assert all(d.reason and d.nbytes == graph.storages[d.storage].nbytes for d in decisions)
    assert {d.storage for d in decisions if d.choice is Choice.RECOMPUTE} == set(dropped)
    assert {d.storage for d in decisions if d.choice is Choice.KEEP} == set(candidates(graph)) - set(dropped)
    assert all((d.recompute_us is None) == (d.choice is Choice.NOT_A_CHOICE) for d in decisions)


def test_a_dropped_storage_says_its_size_its_idle_time_its_cost_and_when_it_is_live():
    graph = read_twice()
    found = explained(graph, recompute_once(graph, storages(graph, "f")))["f"]
    assert found == Decision(
        storage=1,
        name="f",
        role=Role.ACTIVATION,
        choice=Choice.RECOMPUTE,
        nbytes=100,
        recompute_us=5.0,
        live=(("f", "g"), ("f", "f_bw")),
        reason="dropped: 100 B idle from g to g_bw, 5 µs to recompute",
    )


def test_a_storage_evicted_twice_is_live_three_times():
    graph = read_twice()
    twice = Plan(evictions=(eviction(graph, "f", "g", "g_bw"), eviction(graph, "f", "g_bw", "f_bw")))
    assert explained(graph, twice)["f"].live == (("f", "g"), ("f", "g_bw"), ("f", "f_bw"))


def test_a_kept_storage_says_what_it_would_cost_from_what_is_kept():
    graph = residual_tower(1)
    found = explained(graph, recompute_once(graph, storages(graph, "b0_conv", "b0_norm.1")))
    assert found["b0_relu"].choice is Choice.KEEP
    # The relu (1 µs) from the batch norm (2 µs), a temporary, from the convolution (8 µs), dropped too.
    assert found["b0_relu"].reason == "kept: 100 B idle from b0_add to b0_relu_bw, 11 µs to recompute"
    assert found["b0_relu"].live == (("b0_relu", "b0_relu_bw"),)
    assert found["b0_add"].recompute_us == 1.0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x", "it is live before the step"),
        ("stem_w", "it is live before the step"),
        ("b0_norm_mean", "it is live before the step"),
        ("loss", "it outlives the step"),
        ("b0_norm.0", "the backward never reads it"),
        ("stem_bw.0", "made by the backward itself, used soon after"),
    ],
)
def test_what_is_no_choice_says_why(name, reason):
    found = explained(residual_tower(1), Plan())[name]
    assert found.choice is Choice.NOT_A_CHOICE
    assert found.reason == reason


def test_what_cannot_be_made_again_says_why():
    reason = "what it is computed from changes before it could be recomputed"
    assert explained(updated_between(), Plan())["f"].reason == reason
    assert explained(foreign_view(), Plan())["f"].reason == "op 'peek' may never be rerun: it calls foreign code"


def test_a_saved_generator_state_is_live_only_where_a_rerun_needs_it():
    graph, name = masked(), "drop_mask (saved generator state)"
    unused, used = explained(graph, Plan()), explained(graph, recompute_once(graph, storages(graph, "drop_mask")))
    assert "generator state" in unused[name].reason
    assert unused[name].live == ()
    assert used[name].live == (("drop_mask", "drop_mask"),)
