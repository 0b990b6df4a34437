"""Files are written whole, through links and with their mode, or not at all; what is not ours is refused in a line."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from planner import files
from planner.errors import FileFormatError
from planner.ir import Graph
from planner.plan import Plan
from planner.synthetic import chain

GRAPH = chain(3)


def refusal(path: Path, *, save: bool = False) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(FileFormatError) as refused:
        GRAPH.save(path) if save else Graph.load(path)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 400
    assert str(path) in message
    return message


# -- writing ----------------------------------------------------------------------------------------------------------


def test_saving_through_a_link_writes_to_what_it_points_at(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "graph.json", tmp_path / "link.json"
    link.symlink_to(target)
    for _ in range(2):  # where the target is not there yet, and where it is
        GRAPH.save(link)
        assert link.is_symlink()
        assert Graph.load(target) == GRAPH


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755])
def test_saving_over_a_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "graph.json"
    path.write_text("old")
    path.chmod(mode)
    GRAPH.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert Graph.load(path) == GRAPH


def test_a_new_file_has_the_mode_that_any_new_file_has(tmp_path):
    (tmp_path / "other").write_text("")
    GRAPH.save(tmp_path / "graph.json")
    assert (tmp_path / "graph.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_is_no_regular_file_is_not_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    for name, what in (("pipe", "a pipe"), ("folder", "a folder")):
        assert f"it is {what}, not a file; nothing was written" in refusal(tmp_path / name, save=True)
    with pytest.raises(FileFormatError, match="/dev/null: it is a device, not a file; nothing was written"):
        GRAPH.save(tmp_path / "null")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "null", "pipe"]


@pytest.mark.parametrize("name", ["missing/graph.json", "a" * 300, "loop", "file/graph.json", "nul\0l"])
def test_where_nothing_can_be_written_one_line_says_why(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot be written: ") as refused:
        GRAPH.save(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("at", ["chmod", "replace"])
def test_a_failure_half_way_leaves_the_old_file_and_no_scratch_file(tmp_path, monkeypatch, error, at):
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(Path, at, fail)
    expected = FileFormatError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        GRAPH.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["graph.json"]
    assert path.read_text() == "old"


def test_a_file_whose_name_is_as_long_as_names_can_be_is_written(tmp_path):
    path = tmp_path / f"{'a' * 250}.json"
    GRAPH.save(path)
    assert Graph.load(path) == GRAPH


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_missing_file_a_folder_and_a_pipe_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert "there is no such file" in refusal(tmp_path / "missing")
    assert "it is a folder, not a file" in refusal(tmp_path)
    assert "it is a pipe that nobody writes to" in refusal(tmp_path / "pipe")
    assert "cannot be read: " in refusal(tmp_path / "loop")


def test_what_comes_through_a_pipe_is_loaded():
    reading, writing = os.pipe()

    def write():
        with os.fdopen(writing, "w") as file:
            file.write(document())

    writer = threading.Thread(target=write)
    writer.start()
    assert Graph.load(f"/dev/fd/{reading}") == GRAPH
    writer.join()
    os.close(reading)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"format":"recompute-planner graph","schema":1,"graph":['])
def test_deep_nesting_is_refused(tmp_path, opening):
    path = tmp_path / "deep.json"
    path.write_text(opening * 100_000)
    assert "nested deeper than any graph file" in refusal(path)


def document(**graph: object) -> str:
    saved = {"format": "recompute-planner graph", "schema": 1, "graph": files.encode(GRAPH)}
    saved["graph"].update(graph)
    return json.dumps(saved)


NUMBERS = {
    "more digits than text may have": (
        "1" + "0" * 5000,
        "a number in it has more digits than anything that is saved here",
    ),
    "more than anything can be": (str(10**400), "ops[0].time_us: a number of 1,329 bits is more than anything"),
    "no number": ("NaN", "ops[0].time_us: expected float, found nan"),
    "infinity": ("Infinity", "ops[0].time_us: expected float, found inf"),
    "infinity in digits": ("1e999", "ops[0].time_us: expected float, found inf"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_nothing_can_be_is_refused(tmp_path, case):
    number, words = NUMBERS[case]
    path = tmp_path / "graph.json"
    path.write_text(document().replace('"time_us": 1.0', f'"time_us": {number}', 1))
    assert words in refusal(path)


def test_sizes_that_do_not_add_up_to_bytes_are_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(document(storages=[{"id": s.id, "nbytes": 2**61, "role": s.role.value} for s in GRAPH.storages]))
    assert "add up to more than" in refusal(path)


def test_a_bound_that_is_no_number_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    for bound in ("NaN", "-Infinity"):
        Plan(lower_bound_us=1.5).save(path, GRAPH)
        path.write_text(path.read_text().replace("1.5", bound))
        with pytest.raises(FileFormatError, match=r"plan\.lower_bound_us: expected float, found"):
            Plan.load(path, GRAPH)


def test_a_hundred_megabytes_of_garbage_are_not_read_to_their_end(tmp_path, monkeypatch):
    path = tmp_path / "garbage.json"
    with path.open("wb") as file:
        file.write(b"[1, 2, 3")
        file.truncate(100 * 2**20)
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail(f"parsed {len(text):,} characters"))
    assert "not a file of this project" in refusal(path)


def test_a_refusal_shows_the_beginning_of_what_it_found_only(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(document(outputs={"many": "x" * 10_000}, name=["y" * 10_000] * 3))
    refusal(path)
    path.write_text(document()[:-1] + f', "schema": "{"z" * 10_000}"}}')
    assert "schema" in refusal(path)


def test_text_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_bytes(document().encode("utf-16"))
    assert "not a whole JSON file" in refusal(path)
