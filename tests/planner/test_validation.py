"""What a graph must not contradict: refused by name of the op or value, wherever a graph enters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.errors import GraphError
from planner.ir import Phase, Role
from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import simulate
from planner.synthetic import Builder, chain
from planner.units import MOST_BYTES
from tests.small import OPS, RNG_STATE, STORAGE, VALUES, sample, with_op, with_storage, with_value

CONTRADICTIONS = {
    "a use before the definition": (
        lambda g: with_op(g, "f", inputs=(VALUES["x"], VALUES["g"])),
        "op 'f' uses value 'g' before it is defined",
    ),
    "an op that reads its own output": (
        lambda g: with_op(g, "g", inputs=(VALUES["g"],)),
        "op 'g' uses value 'g' before it is defined",
    ),
    "an input that does not exist": (
        lambda g: with_op(g, "f", inputs=(99,)),
        "op 'f' refers to value 99, which does not exist",
    ),
    "a negative input": (
        lambda g: with_op(g, "g", inputs=(-1,)),
        "op 'g' refers to value -1, which does not exist",
    ),
    "an output that does not exist": (
        lambda g: with_op(g, "g", outputs=(VALUES["g"], 99)),
        "op 'g' refers to value 99, which does not exist",
    ),
    "a graph output that does not exist": (
        lambda g: replace(g, outputs=(99,)),
        "the graph's output 99 is no value of it",
    ),
    "a repeated op": (
        lambda g: with_op(g, "view", id=OPS["f"]),
        "op 'view' at position 1 repeats the id 0",
    ),
    "a repeated value": (
        lambda g: with_value(g, "w", id=VALUES["x"]),
        "value 'w' at position 1 repeats the id 0",
    ),
    "a repeated storage": (
        lambda g: with_storage(g, 1, id=0),
        "storage at position 1 repeats the id 0",
    ),
    "an id that is no position": (
        lambda g: with_op(g, "step", id=17),
        "op 'step' at position 5 has id 17; ids count from 0",
    ),
    "a negative size": (
        lambda g: with_storage(g, 2, nbytes=-16),
        "storage 2 (of 'f') has a negative size: -16 bytes",
    ),
    "a negative time": (
        lambda g: with_op(g, "f", time_us=-1.0),
        "op 'f' has a negative or undefined time: -1.0 µs",
    ),
    "a time that is no number": (
        lambda g: with_op(g, "f", time_us=math.nan),
        "op 'f' has a negative or undefined time: nan µs",
    ),
    "a time without end": (
        lambda g: with_op(g, "f", time_us=math.inf),
        "op 'f' has a negative or undefined time: inf µs",
    ),
    "a negative workspace": (
        lambda g: with_op(g, "f", workspace_bytes=-1),
        "op 'f' has a negative workspace: -1 bytes",
    ),
    "a negative round": (
        lambda g: with_op(g, "f", round=-1),
        "op 'f' has a negative round: -1",
    ),
    "a storage that does not exist": (
        lambda g: with_value(g, "f", storage=99),
        "value 'f' lies in storage 99, which does not exist",
    ),
    "a producer that does not exist": (
        lambda g: with_value(g, "f", producer=99),
        "value 'f' is made by op 99, which does not exist",
    ),
    "a producer that denies it": (
        lambda g: with_value(g, "w", producer=OPS["f"]),
        "value 'w' names op 'f' as its producer, which does not list it as output",
    ),
    "an output that names another producer": (
        lambda g: with_op(g, "g", outputs=(VALUES["g"], VALUES["f"])),
        "op 'g' lists the output 'f', made by op 0",
    ),
    "an output listed twice": (
        lambda g: with_op(g, "g", outputs=(VALUES["g"], VALUES["g"])),
        "op 'g' defines 'g' a second time",
    ),
    "a view of nothing": (
        lambda g: with_value(g, "view", base=99),
        "value 'view' is a view of value 99, which does not exist",
    ),
    "a view in another storage than its base": (
        lambda g: with_value(g, "view", base=VALUES["x"]),
        "value 'view' is a view of 'x' but lies in another storage",
    ),
    "a view of what comes later": (
        lambda g: with_value(g, "f", base=VALUES["view"]),
        "op 'f' makes a view of value 'view', which is not there yet",
    ),
    "a view of itself": (
        lambda g: with_value(g, "view", base=VALUES["view"]),
        "op 'view' makes a view of value 'view', which is not there yet",
    ),
    "a view of what its op does not read": (
        lambda g: with_op(g, "view", inputs=(VALUES["x"],)),
        "op 'view' makes a view of value 'f' without reading it",
    ),
    "a second tensor in a taken storage": (
        lambda g: with_value(g, "g", storage=STORAGE["x"]),
        f"op 'g' makes 'g' in storage {STORAGE['x']}, which is taken: say which value it is a view of",
    ),
    "a mutation of what is no input": (
        lambda g: with_op(g, "step", mutates=(VALUES["x"],)),
        "op 'step' mutates value 'x', which is not its input",
    ),
    "an in-place form over what is no input": (
        lambda g: with_op(g, "g", overwritable=(VALUES["x"],)),
        "op 'g' could overwrite value 'x', which is not its input",
    ),
    "a mutation that may be repeated freely": (
        lambda g: with_op(g, "f", mutates=(VALUES["w"],)),
        "op 'f' mutates value 'w', so it cannot be rerun freely",
    ),
    "a ban without a reason": (
        lambda g: with_op(g, "step", never_reason=""),
        "op 'step' may never be rerun, but gives no reason",
    ),
    "a random op without a saved state": (
        lambda g: with_op(g, "drop", rng_state=None),
        "op 'drop': a saved generator state goes with rerun=replay_rng",
    ),
    "a saved state of an op that is not random": (
        lambda g: with_op(g, "g", rng_state=RNG_STATE),
        "op 'g': a saved generator state goes with rerun=replay_rng",
    ),
    "a saved state in no storage": (
        lambda g: with_op(g, "drop", rng_state=99),
        "op 'drop' saves its generator in storage 99, which does not exist",
    ),
    "a saved state over another tensor": (
        lambda g: with_op(g, "drop", rng_state=STORAGE["x"]),
        f"op 'drop' saves its generator in storage {STORAGE['x']}, which is taken",
    ),
}


def test_a_sound_graph_validates_to_itself():
    graph = sample()
    assert graph.validate() is graph


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_the_op_or_value_and_what_is_wrong(what):
    contradict, message = CONTRADICTIONS[what]
    with pytest.raises(GraphError) as caught:
        contradict(sample()).validate()
    assert message in str(caught.value)


def test_only_the_execution_order_counts_so_a_gradient_penalty_is_sound():
    b = Builder("gradient-penalty")
    x = b.input("x", 8)
    h = b.one("f", [x], 8)
    gradient = b.one("f_bw", [h], 8, phase=Phase.BACKWARD, role=Role.GRADIENT)
    norm = b.one("penalty", [gradient, h], 4)
    b.outputs.append(norm)
    b.one("penalty_bw", [norm, gradient], 8, phase=Phase.BACKWARD, role=Role.GRADIENT)
    graph = b.build()
    assert graph.ops[2].phase is Phase.FORWARD
    assert graph.readers[graph.values[gradient].storage] == (2, 3)
    assert simulate(graph, lower(graph, Plan())).time_us == graph.time_us


@pytest.mark.parametrize("storages", [(MOST_BYTES,), (MOST_BYTES // 2, MOST_BYTES // 2)])
def test_more_bytes_than_can_be_added_up_are_refused(storages):
    graph = chain(3)
    for index, nbytes in enumerate(storages):
        graph = with_storage(graph, index, nbytes=nbytes)
    with pytest.raises(GraphError, match="add up to more than"):
        graph.validate()
    with pytest.raises(GraphError, match="add up to more than"):
        with_op(chain(3), "f0", workspace_bytes=MOST_BYTES).validate()
