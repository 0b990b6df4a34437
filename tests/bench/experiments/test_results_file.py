"""Files of rows: whole or not at all, and gone on from only under the same conditions."""

import json

import pytest

from bench.experiments.results_file import resumed_rows, save_rows
from planner.errors import FileFormatError


def test_rows_are_resumed_only_under_the_same_settings_and_versions(tmp_path):
    file = tmp_path / "rows.json"
    assert resumed_rows(file, settings={"pairs": 3}) == []
    save_rows(file, rows=[{"a": 1}], settings={"pairs": 3, "batches": (1, 2)})
    assert resumed_rows(file, settings={"pairs": 3, "batches": (1, 2)}) == [{"a": 1}]
    with pytest.raises(FileFormatError, match="made with pairs 3, not 5"):
        resumed_rows(file, settings={"pairs": 5, "batches": (1, 2)})
    document = json.loads(file.read_text())
    document["versions"]["torch"] = "0.4"
    file.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"made with torch '0\.4', not .*delete it or use another --out"):
        resumed_rows(file, settings={"pairs": 3, "batches": (1, 2)})


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": []}', "{half"])
def test_a_file_that_holds_no_rows_is_refused_with_the_way_on(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(FileFormatError, match="delete it or use another --out"):
        resumed_rows(file, settings={})


def test_rows_are_saved_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    save_rows(tmp_path / "rows.json", rows=[{"a": 1}])
    document = json.loads((tmp_path / "rows.json").read_text())
    assert (document["commit"], document["rows"]) == ("unknown", [{"a": 1}])


def test_saving_leaves_no_partial_file_behind(tmp_path):
    save_rows(tmp_path / "rows.json", rows=[])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
