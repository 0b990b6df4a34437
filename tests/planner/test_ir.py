"""The graph: what it refuses, what it derives, and that it survives a file."""

from __future__ import annotations

import errno
import io
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis import liveness
from planner.errors import FileFormatError, GraphError
from planner.ir import Graph, Op, Phase, Rerun, Role, Timing, TimingKind
from planner.plan import Plan
from planner.schedule import lower
from planner.simulator import simulate
from planner.synthetic import Builder, accumulation, chain, residual_tower
from tests.graphs import networks

OPS = {name: i for i, name in enumerate(("f", "view", "drop", "g", "g_bw", "step"))}
VALUES = {name: i for i, name in enumerate(("x", "w", "f", "view", "drop", "g", "g_bw"))}


def sample() -> Graph:
    """x, w -> f -> view -> drop -> g, the backward of g, and an optimizer that changes w."""
    b = Builder("sample")
    x, w = b.input("x", 8), b.input("w", 4, Role.PARAM)
    v = b.view("view", b.one("f", [x, w], 16))
    y = b.one("g", [b.one("drop", [v], 16, rerun=Rerun.REPLAY_RNG, rng_bytes=2)], 4)
    gradient = b.one("g_bw", [y, v], 4, phase=Phase.BACKWARD, role=Role.GRADIENT)
    b.update("step", w, gradient)
    b.outputs.append(y)
    return b.build()


def with_op(graph: Graph, name: str, **changes: object) -> Graph:
    """The graph with some fields of one op changed, unchecked."""
    return replace(graph, ops=tuple(replace(op, **changes) if op.name == name else op for op in graph.ops))


def with_value(graph: Graph, name: str, **changes: object) -> Graph:
    return replace(graph, values=tuple(replace(v, **changes) if v.name == name else v for v in graph.values))


def with_storage(graph: Graph, index: int, **changes: object) -> Graph:
    storages = list(graph.storages)
    storages[index] = replace(storages[index], **changes)
    return replace(graph, storages=tuple(storages))


STORAGE = {name: sample().values[v].storage for name, v in VALUES.items()}
RNG_STATE = sample().ops[OPS["drop"]].rng_state

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


# -- derived tables ---------------------------------------------------------------------------------------------


def timed_line() -> Graph:
    """f (2 µs), g (3), loss (1), then their backwards (4, 5, 6); g_bw reads f, and f's statistics idle at once."""
    b = Builder("timed-line")
    x = b.input("x", 8)
    f, stats = b.op("f", [x], [16, 2], time_us=2.0)
    g = b.one("g", [f], 16, time_us=3.0)
    loss = b.one("loss", [g], 4, time_us=1.0)
    backward = {"phase": Phase.BACKWARD, "role": Role.GRADIENT}
    d_g = b.one("loss_bw", [loss, g], 16, time_us=4.0, **backward)
    d_f = b.one("g_bw", [d_g, f], 16, time_us=5.0, **backward)
    b.one("f_bw", [d_f, stats, x], 8, time_us=6.0, **backward)
    b.outputs.append(loss)
    return b.build()


def live_of(graph: Graph, name: str) -> tuple:
    live = liveness(graph)[graph.storage_names.index(name)]
    return (
        live.created_at,
        (live.first_fw_access, live.last_fw_access),
        (live.first_bw_access, live.last_bw_access),
        (live.idle_after, live.idle_until),
        live.inactive_us,
    )


def test_liveness_is_what_a_hand_finds():
    graph = timed_line()
    assert graph.elapsed_us == (0.0, 2.0, 5.0, 6.0, 10.0, 15.0, 21.0)
    # f is read by g (op 1) and by g_bw (op 4); loss (1 µs) and loss_bw (4 µs) pass in between.
    assert live_of(graph, "f.0") == (0, (1, 1), (4, 4), (1, 4), 5.0)
    # Nobody reads the statistics before f_bw: they idle from the end of f (2 µs) to its start (15 µs).
    assert live_of(graph, "f.1") == (0, (None, None), (5, 5), (0, 5), 13.0)
    # loss reads g last, and loss_bw comes right after it.
    assert live_of(graph, "g") == (1, (2, 2), (3, 3), (2, 3), 0.0)
    # What is live before the step, and what the backward makes, never idles.
    assert live_of(graph, "x") == (None, (0, 0), (5, 5), (None, None), 0.0)
    assert live_of(graph, "g_bw") == (4, (None, None), (5, 5), (None, None), 0.0)


def test_each_round_of_an_accumulation_idles_until_its_own_backward():
    graph = accumulation(2, 2)
    names = [op.name for op in graph.ops]
    for r in (0, 1):
        live = liveness(graph)[graph.storage_names.index(f"r{r}_f0")]
        assert (names[live.idle_after], names[live.idle_until]) == (f"r{r}_f1", f"r{r}_f1_bw")
        # loss (1 µs) and its backward (2 µs) pass in between.
        assert live.inactive_us == 3.0


def test_what_the_forward_reads_after_a_backward_still_idles_until_then():
    b = Builder("late-reader")
    h = b.one("f", [b.input("x", 8)], 8)
    b.one("f_bw", [h], 8, phase=Phase.BACKWARD, time_us=7.0)
    b.one("other_bw", [h], 8, phase=Phase.BACKWARD)
    b.outputs.append(b.one("again", [h], 8))
    live = liveness(b.build())[1]
    assert (live.idle_after, live.idle_until, live.last_fw_access, live.last_access) == (0, 1, 3, 3)


def test_storages_know_who_makes_reads_writes_and_names_them():
    graph = sample()
    assert graph.maker[STORAGE["f"]] == OPS["f"]
    assert graph.maker[STORAGE["w"]] is None
    assert graph.readers[STORAGE["f"]] == (OPS["view"], OPS["drop"], OPS["g_bw"])
    assert graph.writers[STORAGE["w"]] == (OPS["step"],)
    assert graph.makes[OPS["view"]] == ()
    assert graph.storage_names[STORAGE["f"]] == "f"
    assert graph.storage_names[RNG_STATE] == "drop (saved generator state)"
    assert graph.held_storages == {STORAGE["x"], STORAGE["w"], STORAGE["g"]}
    assert graph.start_bytes == 8 + 4


# -- the fingerprint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "same",
    [
        lambda g: g.with_times(tuple(range(len(g.ops))), timing=Timing(kind=TimingKind.MEASURED, device="a CPU")),
        lambda g: replace(g, name="another"),
        lambda g: with_op(g, "f", module_path="layer.0", source_line="model.py:3"),
    ],
    ids=["times", "name", "source"],
)
def test_the_fingerprint_ignores_times_and_what_is_only_for_people(same):
    assert same(sample()).fingerprint == sample().fingerprint


@pytest.mark.parametrize(
    "other",
    [
        lambda g: with_value(g, "f", shape=(2, 2)),
        lambda g: with_value(g, "f", dtype="float16"),
        lambda g: with_storage(g, 2, nbytes=32),
        lambda g: with_storage(g, 2, role=Role.TEMP),
        lambda g: with_op(g, "g_bw", inputs=(VALUES["g"],)),
        lambda g: with_op(g, "g", overwritable=(VALUES["drop"],)),
        lambda g: with_op(g, "f", rerun=Rerun.NEVER, never_reason="no"),
        lambda g: with_op(g, "f", target="conv"),
        lambda g: with_op(g, "f", round=1),
        lambda g: replace(g, outputs=(VALUES["g"], VALUES["f"])),
        lambda g: chain(3),
    ],
    ids=["shape", "dtype", "bytes", "role", "edge", "in-place", "rerun", "target", "round", "outputs", "graph"],
)
def test_the_fingerprint_sees_shapes_dtypes_and_structure(other):
    assert other(sample()).validate().fingerprint != sample().fingerprint


def test_other_times_must_be_as_many_as_the_ops_and_are_checked():
    graph = sample()
    with pytest.raises(GraphError, match="op 'f' has a negative"):
        graph.with_times((-1.0, *[0.0] * 5), timing=Timing())
    with pytest.raises(GraphError, match=": 1 times for 6 ops"):
        graph.with_times((1.0,), timing=Timing())


# -- files ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(networks(), st.data())
def test_a_graph_comes_back_from_its_file_exactly(graph, data):
    times = data.draw(
        st.lists(st.floats(0, allow_infinity=False, allow_nan=False), min_size=len(graph.ops), max_size=len(graph.ops))
    )
    timing = Timing(kind=TimingKind.ESTIMATED, device='a π-GPU "9"\n')
    graph = graph.with_times(tuple(times), timing=timing)
    with tempfile.TemporaryDirectory() as folder:
        graph.save(Path(folder) / "graph.json")
        again = Graph.load(Path(folder) / "graph.json")
    assert again == graph
    assert again.fingerprint == graph.fingerprint


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "graph.json"
    full = with_value(with_op(sample(), "f", module_path="m.0", source_line="m.py:1"), "f", shape=(2, 4), dtype="f16")
    full.save(path)
    assert Graph.load(path) == full
    return path


def edit(path: Path, change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(saved, share):
    text = saved.read_text().rstrip()
    saved.write_text(text[: int(share * len(text))])
    with pytest.raises(FileFormatError, match=r"graph\.json: not a whole JSON file .* cut off"):
        Graph.load(saved)


@pytest.mark.parametrize("text", ["[]", "{}", '"graph"', "null", '{"format": "recompute-planner plan", "schema": 1}'])
def test_a_foreign_json_file_is_refused(saved, text):
    saved.write_text(text)
    with pytest.raises(FileFormatError, match=r"graph\.json: not a graph file of this project"):
        Graph.load(saved)


def test_bytes_that_are_no_text_are_refused(saved):
    saved.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(FileFormatError, match="not a whole JSON file"):
        Graph.load(saved)


REFUSED_EDITS = {
    "a newer schema": (lambda d: d.update(schema=2), "graph schema 2, but this program reads 1: update this program"),
    "an older schema": (lambda d: d.update(schema=0), "graph schema 0, but this program reads 1: save it again"),
    "no schema": (lambda d: d.pop("schema"), "graph schema None, but this program reads 1: save it again"),
    "no graph": (lambda d: d.pop("graph"), "the graph itself is missing"),
    "an unknown field": (lambda d: d["graph"]["ops"][0].update(colour="red"), "graph.ops[0]: unknown field 'colour'"),
    "a missing field": (lambda d: d["graph"]["ops"][1].pop("name"), "graph.ops[1]: Op lacks the field 'name'"),
    "text for a number": (
        lambda d: d["graph"]["storages"][2].update(nbytes="16"),
        "graph.storages[2].nbytes: expected int, found '16'",
    ),
    "a truth for a number": (
        lambda d: d["graph"]["storages"][2].update(nbytes=True),
        "graph.storages[2].nbytes: expected int, found True",
    ),
    "a fraction for an id": (
        lambda d: d["graph"]["values"][0].update(storage=0.0),
        "graph.values[0].storage: expected int, found 0.0",
    ),
    "a number for text": (lambda d: d["graph"].update(name=3), "graph.name: expected str, found 3"),
    "a time that is no number": (
        lambda d: d["graph"]["ops"][0].update(time_us=math.nan),
        "graph.ops[0].time_us: expected float, found nan",
    ),
    "nothing for a number": (
        lambda d: d["graph"]["ops"][0].update(time_us=None),
        "graph.ops[0].time_us: expected float, found None",
    ),
    "a number for a list": (lambda d: d["graph"].update(ops=7), "graph.ops: expected a list, found 7"),
    "a list for a record": (lambda d: d["graph"]["ops"].insert(0, []), "graph.ops[0]: expected an object, found []"),
    "an unknown phase": (
        lambda d: d["graph"]["ops"][0].update(phase="sideways"),
        "graph.ops[0].phase: 'sideways' is not one of forward, backward, optimizer",
    ),
    "a graph that contradicts itself": (
        lambda d: d["graph"]["ops"][0].update(inputs=[VALUES["g"]]),
        "op 'f' uses value 'g' before it is defined",
    ),
}


@pytest.mark.parametrize("what", REFUSED_EDITS)
def test_a_file_with_something_wrong_is_refused_with_the_place(saved, what):
    change, message = REFUSED_EDITS[what]
    edit(saved, change)
    with pytest.raises(FileFormatError) as caught:
        Graph.load(saved)
    assert str(caught.value).startswith(f"{saved}: ")
    assert message in str(caught.value)


def test_a_whole_number_is_read_as_a_time(saved):
    edit(saved, lambda d: d["graph"]["ops"][0].update(time_us=3))
    time_us = Graph.load(saved).ops[0].time_us
    assert (time_us, type(time_us)) == (3.0, float)


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    before = saved.read_bytes()

    class FullDisk(io.TextIOWrapper):
        def write(self, text: str) -> int:
            super().write(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, _mode, **_: FullDisk(io.FileIO(path, "x")))
    with pytest.raises(FileFormatError, match="cannot be written: No space left"):
        residual_tower(2).save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_save_over_an_old_file_replaces_it_and_disturbs_nobody_who_reads_it(saved):
    before = saved.read_text()
    with saved.open() as reader:
        residual_tower(1).save(saved)
        assert reader.read() == before
    assert Graph.load(saved) == residual_tower(1)
    assert list(saved.parent.iterdir()) == [saved]


def test_records_are_frozen():
    op = sample().ops[0]
    assert isinstance(op, Op)
    with pytest.raises(AttributeError):
        op.time_us = 1.0
