"""The made-up steps are sound, and have the shapes that they are named after."""

from __future__ import annotations

import pytest

from planner.analysis import candidates
from planner.ir import Phase, Rerun, Role
from planner.synthetic import (
    Builder,
    accumulation,
    chain,
    diamond,
    layered,
    residual_tower,
    resnet_like,
    transformer,
    unet,
)
from tests.small import names

SHAPES = {
    "chain-5": lambda: chain(5),
    "diamond-3": lambda: diamond(3),
    "tower-2": lambda: residual_tower(2),
    "unet-3": lambda: unet(3),
    "transformer-2": lambda: transformer(2),
    "accumulation-2x3": lambda: accumulation(2, 3),
    "layered-30": lambda: layered(30),
    "resnet-like-14": lambda: resnet_like((1, 1, 1, 1), nbytes=1 << 10),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_sound_named_after_itself_and_leaves_something_to_drop(name):
    graph = SHAPES[name]()
    assert graph.validate().name == name
    assert candidates(graph)
    assert SHAPES[name]().fingerprint == graph.fingerprint


def test_a_layered_net_has_as_many_forward_ops_as_asked_varied_by_its_seed_and_all_of_them_matter():
    graph = layered(200)
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    assert len(forward) == 200 + 1  # and the loss
    assert all(graph.readers[graph.values[op.outputs[0]].storage] for op in forward[:-1])
    assert len({op.time_us for op in forward}) > 100
    assert any(len(graph.readers[s]) > 4 for s in candidates(graph))
    assert layered(200, seed=1).fingerprint != graph.fingerprint


def test_a_backward_mirrors_its_forward():
    graph = chain(3, param_bytes=8)
    assert [op.name for op in graph.ops] == [
        *("f0", "f1", "f2", "loss", "loss_bw", "f2_bw", "f1_bw", "f0_bw", "f2_sgd", "f1_sgd", "f0_sgd"),
    ]
    assert [op.phase for op in graph.ops] == [Phase.FORWARD] * 4 + [Phase.BACKWARD] * 4 + [Phase.OPTIMIZER] * 3
    assert sum(op.time_us for op in graph.ops if op.phase is Phase.BACKWARD) == 2 * 4


def test_a_u_net_s_skips_are_read_on_the_way_up():
    graph = unet(2)
    skip = graph.storage_names.index("act0")
    assert "cat0" in [graph.ops[op].name for op in graph.readers[skip]]


def test_a_transformer_shares_one_parameter_between_its_first_and_last_layer():
    graph = transformer(1)
    shared = graph.storage_names.index("embedding")
    readers = [graph.ops[op].name for op in graph.readers[shared]]
    assert {"embed", "logits"} <= set(readers)


def test_an_accumulation_runs_its_rounds_one_after_the_other_on_the_same_parameters():
    graph = accumulation(3, 2)
    assert sorted({op.round for op in graph.ops if op.phase is not Phase.OPTIMIZER}) == [0, 1, 2]
    assert sum(s.role is Role.PARAM for s in graph.storages) == 2
    assert len(graph.outputs) == 3


def test_between_them_the_shapes_hold_every_rerun_kind():
    kinds = {op.rerun for make in SHAPES.values() for op in make().ops}
    assert kinds == set(Rerun)


def test_the_large_one_has_the_depth_and_about_the_size_of_resnet_152():
    graph = resnet_like(ops_per_update=16)
    layers = [op for op in graph.ops if op.phase is Phase.FORWARD and op.target in ("conv", "addmm")]
    assert graph.name == "resnet-like-152"
    assert len(layers) == 152
    assert 3_300 <= len(graph.ops) <= 3_700


def test_a_builder_names_several_outputs_by_number():
    b = Builder("several")
    b.op("f", [b.input("x", 1)], [2, 3])
    assert names(b.build(), [1, 2]) == ["f.0", "f.1"]
