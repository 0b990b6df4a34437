"""Plans: what they lower to, step by step, what is refused, and how they are saved."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from planner.analysis import candidates
from planner.errors import FileFormatError, PlanError
from planner.incremental import Incremental
from planner.ir import Graph, Phase, Rerun, Role
from planner.plan import BoundClass, Eviction, Plan, recompute_each_time, recompute_once, with_bound
from planner.schedule import Run, RunKind, lower
from planner.simulator import simulate
from planner.synthetic import Builder, chain, residual_tower
from tests.graphs import networks_with_drops
from tests.small import (
    BACKWARD,
    block,
    eviction,
    masked,
    op,
    read_twice,
    split,
    storage,
    storages,
    viewed,
    viewed_in_backward,
)


def steps(graph: Graph, plan: Plan, **options: bool) -> str:
    return lower(graph, plan, **options).text(graph)


def reruns(graph: Graph, plan: Plan) -> list[str]:
    found = [s.op for s in lower(graph, plan).steps if isinstance(s, Run) and s.kind is RunKind.RERUN]
    return [graph.ops[o].name for o in found]


# -- golden schedules -------------------------------------------------------------------------------------------


def test_a_chain_with_one_drop_reruns_it_just_before_its_backward_use():
    graph = chain(3)
    assert steps(graph, recompute_once(graph, storages(graph, "f0"))) == block("""
        run f0
        run f1
          free f0
        run f2
        run loss
        run loss_bw
          free f2
        run f2_bw
          free f1
          free loss_bw
        run f0 (rerun)
        run f1_bw
          free f0
          free f2_bw
        run f0_bw
          free f1_bw
          free f0_bw
    """)


def test_a_residual_block_is_recomputed_from_its_input_with_its_in_place_forms():
    graph = residual_tower(1)
    assert steps(graph, recompute_once(graph, storages(graph, "b0_conv", "b0_norm.1", "b0_relu"))) == block("""
        run stem
        run b0_conv
        run b0_norm
          free b0_conv
          free b0_norm.1
        run b0_relu into b0_norm.0
        run b0_add
          free b0_relu
        run loss
        run loss_bw
          free b0_add
        run b0_add_bw
          free loss_bw
        run b0_conv (rerun)
        run b0_norm (rerun)
        run b0_relu into b0_norm.0 (rerun)
        run b0_relu_bw
          free b0_relu
          free b0_add_bw.0
        run b0_norm_bw
          free b0_conv
          free b0_norm.1
          free b0_relu_bw
        run b0_conv_bw
          free stem
          free b0_norm_bw
        run stem_bw
          free b0_add_bw.1
          free b0_conv_bw.0
          free stem_bw.0
        run b0_conv_sgd
          free b0_conv_bw.1
        run stem_sgd
          free stem_bw.1
    """)


def test_a_dropout_is_replayed_with_its_saved_generator_state():
    graph = masked()
    assert steps(graph, recompute_once(graph, storages(graph, "drop_mask", "drop"))) == block("""
        run f
        run drop_mask (original, saving the generator state)
        run drop
          free f
          free drop_mask
        run g
          free drop
        run loss
        run loss_bw
          free g
        run f (rerun)
        run drop_mask (rerun)
          free drop_mask (saved generator state)
        run drop (rerun)
          free f
        run g_bw
          free drop
          free loss_bw
        run drop_bw
          free drop_mask
          free g_bw
        run f_bw
          free drop_bw
          free f_bw
    """)


def test_a_dropout_whose_mask_is_kept_saves_no_generator_state():
    graph = masked()
    text = steps(graph, recompute_once(graph, storages(graph, "drop")))
    assert "drop (rerun)" in text
    assert "generator" not in text


def test_an_op_with_two_outputs_is_rerun_once_for_both():
    graph = split()
    assert steps(graph, recompute_once(graph, storages(graph, "halve.0", "halve.1"))) == block("""
        run halve
        run left
          free halve.0
        run right
          free halve.1
        run loss
        run loss_bw
          free left
          free right
        run halve (rerun)
        run right_bw
          free halve.1
          free loss_bw.1
          free right_bw
        run left_bw
          free halve.0
          free loss_bw.0
          free left_bw
    """)


def test_an_output_made_again_beside_the_one_that_is_wanted_is_freed_at_once():
    graph = split()
    text = steps(graph, recompute_once(graph, storages(graph, "halve.0")))
    assert (
        block("""
        run halve (rerun)
          free halve.1
        run left_bw
    """)
        in text
    )


def test_views_are_derived_again_from_the_recomputed_storage():
    graph = viewed()
    assert steps(graph, recompute_once(graph, storages(graph, "f"))) == block("""
        run f
        run flat
        run heads
        run g
          free f
        run loss
        run loss_bw
          free g
        run f (rerun)
        run flat (rerun)
        run heads (rerun)
        run g_bw
          free f
          free loss_bw
        run heads_bw
          free g_bw
        run flat_bw
          free heads_bw
        run f_bw
          free flat_bw
          free f_bw
    """)


def test_a_view_that_the_backward_itself_makes_is_made_once_in_the_clone():
    graph = viewed_in_backward()
    plan = recompute_once(graph, storages(graph, "f"))
    assert steps(graph, plan) == block("""
        run f
        run loss
          free f
        run loss_bw
        run f (rerun)
        run turned
        run g_bw
          free loss_bw
        run f_bw
          free f
          free g_bw
          free f_bw
    """)
    state = Incremental(graph, storages(graph, "f"))
    timeline = simulate(graph, lower(graph, plan))
    assert (state.peak()[0], state.recompute_us) == (timeline.peak_bytes, timeline.recompute_us) == (146, 3.0)


def test_a_storage_may_be_evicted_twice():
    graph = read_twice()
    twice = Plan(evictions=(eviction(graph, "f", "g", "g_bw"), eviction(graph, "f", "g_bw", "f_bw")))
    assert steps(graph, twice) == block("""
        run f
        run g
          free f
        run loss
        run loss_bw
          free g
        run f (rerun)
        run g_bw
          free f
          free loss_bw
        run mid_bw
          free g_bw
        run f (rerun)
        run f_bw
          free f
          free mid_bw
          free f_bw
    """)


def test_two_consumers_share_one_clone():
    graph = read_twice()
    assert steps(graph, recompute_once(graph, storages(graph, "f"))) == block("""
        run f
        run g
          free f
        run loss
        run loss_bw
          free g
        run f (rerun)
        run g_bw
          free loss_bw
        run mid_bw
          free g_bw
        run f_bw
          free f
          free mid_bw
          free f_bw
    """)


def test_a_restoration_before_any_need_is_honoured():
    graph = chain(3)
    text = steps(graph, Plan(evictions=(eviction(graph, "f0", "f1", "loss_bw"),)))
    assert (
        block("""
        run loss
        run f0 (rerun)
        run loss_bw
    """)
        in text
    )


def test_recomputing_once_holds_what_recomputing_each_time_makes_again():
    graph = chain(4)
    dropped = storages(graph, "f0", "f1", "f2")
    assert reruns(graph, recompute_once(graph, dropped)) == ["f0", "f1", "f2"]
    assert reruns(graph, recompute_each_time(graph, dropped)) == ["f0", "f1", "f2", "f0", "f1", "f0"]


def test_a_recomputed_batch_norm_updates_its_statistics_once():
    graph = residual_tower(1)
    norm = graph.ops[op(graph, "b0_norm")]
    kinds = [s.kind for s in lower(graph, recompute_once(graph, candidates(graph))).steps
             if isinstance(s, Run) and s.op == norm.id]  # fmt: skip
    assert norm.rerun is Rerun.WITHOUT_SIDE_EFFECT
    assert kinds == [RunKind.ORIGINAL, RunKind.RERUN]


# -- refusals ---------------------------------------------------------------------------------------------------


def refusal(graph: Graph, *evictions: Eviction) -> str:
    with pytest.raises(PlanError) as caught:
        lower(graph, Plan(evictions=evictions))
    return str(caught.value)


def droppable_but(**changes) -> Graph:
    """x, w -> f -> loss with its backward, where f's op is changed in one respect."""
    b = Builder("droppable-but")
    f = b.one("f", [b.input("x", 8), b.input("w", 8, Role.PARAM)], 8, **changes)
    loss = b.one("loss", [f], 1)
    b.outputs.append(loss)
    b.one("loss_bw", [loss, f], 8, **BACKWARD)
    b.op("touch", [f], [], phase=Phase.OPTIMIZER, rerun=Rerun.NEVER, mutates=(f,))
    return b.build()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("f0_w", "storage of 'f0_w' cannot be dropped: it is live before the step"),
        ("x", "storage of 'x' cannot be dropped: it is live before the step"),
        ("loss", "storage of 'loss' cannot be dropped: it outlives the step"),
    ],
)
def test_a_parameter_an_input_and_an_output_cannot_be_dropped(name, message):
    graph = chain(2, param_bytes=8)
    assert message in refusal(graph, eviction(graph, name, "loss", "f1_bw"))


def test_a_saved_generator_state_cannot_be_dropped():
    graph = masked()
    message = refusal(graph, eviction(graph, "drop_mask (saved generator state)", "loss", "g_bw"))
    assert "it is a generator state, saved only where a rerun needs it" in message


def test_a_storage_that_is_written_to_cannot_be_dropped():
    graph = droppable_but()
    message = refusal(graph, eviction(graph, "f", "loss", "loss_bw"))
    assert message == "storage of 'f' cannot be dropped: op 'touch' writes to it after it was made"


def test_what_an_op_made_that_may_never_be_rerun_cannot_be_dropped():
    b = Builder("never")
    f = b.one("f", [b.input("x", 8)], 8, rerun=Rerun.NEVER)
    b.outputs.append(b.one("loss", [f], 1))
    b.one("loss_bw", [f], 8, **BACKWARD)
    graph = b.build()
    message = "storage of 'f' cannot be dropped: op 'f' may never be rerun: told so"
    assert refusal(graph, eviction(graph, "f", "loss", "loss_bw")) == message
    with pytest.raises(PlanError, match="op 'f' may never be rerun: told so"):
        recompute_once(graph, storages(graph, "f"))


def test_evictions_that_overlap_are_refused():
    graph = read_twice()
    message = refusal(graph, eviction(graph, "f", "g", "f_bw"), eviction(graph, "f", "g_bw", None))
    assert message == f"storage of 'f' is evicted after op {op(graph, 'g_bw')}, while it is still evicted"


def test_a_restoration_before_the_eviction_is_refused():
    graph = read_twice()
    after, before = op(graph, "loss"), op(graph, "g")
    message = refusal(graph, eviction(graph, "f", "loss", "g"))
    assert message == f"storage of 'f' is to be restored before op {before}, freed after op {after}"


def test_an_eviction_before_the_storage_exists_is_refused():
    graph = read_twice()
    assert "'g' is to be freed after op 0; it exists from op 1 on" in refusal(graph, eviction(graph, "g", "f", "f_bw"))


@pytest.mark.parametrize("unknown", [99, -1])
def test_an_unknown_storage_is_refused(unknown):
    bad = Eviction(storage=unknown, free_after=0, restore_before=None)
    assert f"there is no storage {unknown}" in refusal(read_twice(), bad)


@pytest.mark.parametrize("make", [recompute_once, recompute_each_time])
@pytest.mark.parametrize("unknown", [-1, 10_000])
def test_a_plan_of_a_storage_that_is_not_there_is_refused(make, unknown):
    with pytest.raises(PlanError, match=f"chain-3: there is no storage {unknown}"):
        make(chain(3), [unknown])


@pytest.mark.parametrize(("after", "before"), [(99, None), (1, 99)])
def test_an_op_beyond_the_step_is_refused(after, before):
    graph = read_twice()
    bad = Eviction(storage=storage(graph, "f"), free_after=after, restore_before=before)
    assert "storage of 'f' is to be" in refusal(graph, bad)


def test_parameters_are_read_before_the_optimizer_changes_them():
    graph = chain(2, param_bytes=8)
    late = eviction(graph, "f1", "loss", "f0_sgd")
    assert op(graph, "f1_sgd") < op(graph, "f0_sgd")
    # Its backward brings f1 back in time, on its own account; to want it again after the update is too late.
    assert refusal(graph, late) == (
        "op 'f1' would be rerun before 'f0_sgd', but its input 'f1_w' was changed by 'f1_sgd' since"
    )
    assert reruns(graph, Plan(evictions=(eviction(graph, "f1", "loss", "loss_bw"),))) == ["f1"]


# -- in-place forms ---------------------------------------------------------------------------------------------


def test_in_place_forms_can_be_switched_off():
    graph = residual_tower(1)
    plan = recompute_once(graph, candidates(graph))
    on, off = steps(graph, plan), steps(graph, plan, in_place=False)
    assert on.count(" into ") == 2
    assert " into " not in off
    assert on.replace(" into b0_norm.0", "").replace(" (rerun)", "") == "\n".join(
        line for line in off.replace(" (rerun)", "").splitlines() if line != "  free b0_norm.0"
    )


def overwriting(
    *, nbytes: int = 8, twice: bool = False, saved: bool = False, of_input: bool = False, unread: bool = False
) -> Graph:
    """f, and an op g that could write over it (or over the step's own input)."""
    b = Builder("overwriting")
    x = b.input("x", 8)
    source = x if of_input else b.one("f", [x], 8)
    reads = [source, b.view("v", source)] if twice else [source]
    g = b.one("g", reads, nbytes, overwritable=(source,))
    read = x if unread else g
    b.outputs.append(b.one("loss", [read], 1))
    b.one("g_bw", [read, *([source] if saved else [])], 8, **BACKWARD)
    return b.build()


def written_over(graph: Graph, plan: Plan | None = None) -> list[str]:
    runs = [s for s in lower(graph, plan or Plan()).steps if isinstance(s, Run)]
    return [graph.storage_names[s.into] for s in runs if s.into is not None]


def test_an_op_writes_over_an_input_that_dies_there():
    assert written_over(overwriting()) == ["f"]


@pytest.mark.parametrize(
    "kept",
    [{"nbytes": 16}, {"twice": True}, {"saved": True}, {"of_input": True}, {"unread": True}],
    ids=["another size", "two inputs in it", "read later", "outlives the step", "an output nobody reads"],
)
def test_an_op_does_not_write_over_its_input_where_that_is_illegal_or_useless(kept):
    assert written_over(overwriting(**kept)) == []


def test_dropping_a_saved_input_lets_the_op_write_over_it():
    graph = overwriting(saved=True)
    assert written_over(graph, recompute_once(graph, storages(graph, "f"))) == ["f"]


# -- files ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(networks_with_drops())
def test_a_plan_comes_back_from_its_file_exactly(drawn):
    graph, dropped = drawn
    plan = with_bound(recompute_once(graph, dropped), lower_bound_us=0.1 + 0.2, bound_class=BoundClass.RECOMPUTE_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json", graph)
        assert Plan.load(Path(folder) / "plan.json", graph) == plan


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    graph, path = chain(3), tmp_path / "plan.json"
    recompute_once(graph, storages(graph, "f0")).save(path, graph)
    return path


def test_a_plan_is_refused_for_another_graph_by_name(saved):
    with pytest.raises(FileFormatError) as caught:
        Plan.load(saved, chain(4))
    message = str(caught.value)
    assert f"{saved}: made for graph 'chain-3' ({chain(3).fingerprint[:12]}), not for 'chain-4'" in message
    assert "plan again for this graph" in message


def test_a_plan_holds_for_the_same_graph_with_other_times(saved):
    assert Plan.load(saved, chain(3, time_us=9.0)) == recompute_once(chain(3), storages(chain(3), "f0"))


def test_a_graph_file_is_no_plan_file(tmp_path):
    chain(3).save(tmp_path / "graph.json")
    with pytest.raises(FileFormatError, match="not a plan file of this project"):
        Plan.load(tmp_path / "graph.json", chain(3))


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("how", "forget", "plan.plan.evictions[0].how: 'forget' is not one of recompute, offload"),
        ("storage", "f0", "plan.plan.evictions[0].storage: expected int, found 'f0'"),
        ("storage", 99, "there is no storage 99"),
    ],
)
def test_a_plan_file_with_something_wrong_is_refused_with_the_place(saved, field, wrong, message):
    document = json.loads(saved.read_text())
    document["plan"]["plan"]["evictions"][0][field] = wrong
    saved.write_text(json.dumps(document))
    with pytest.raises(FileFormatError) as caught:
        Plan.load(saved, chain(3))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{saved}: ")


def test_a_bound_that_is_no_number_is_refused(saved):
    document = json.loads(saved.read_text())
    document["plan"]["plan"]["lower_bound_us"] = float("nan")
    saved.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match="lower_bound_us: expected float, found nan"):
        Plan.load(saved, chain(3))
