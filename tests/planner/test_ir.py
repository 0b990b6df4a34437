"""The graph: what it derives, its fingerprint, and that it survives a file."""

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

from planner.errors import FileFormatError, GraphError
from planner.ir import Graph, Op, Rerun, Role, Timing, TimingKind
from planner.synthetic import chain, residual_tower
from tests.graphs import networks
from tests.small import OPS, RNG_STATE, STORAGE, VALUES, sample, with_op, with_storage, with_value

# -- derived tables ---------------------------------------------------------------------------------------------


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

    class FullDisk(io.FileIO):
        def write(self, data: bytes) -> int:
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda path, _mode, **_: FullDisk(path, "x"))
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
