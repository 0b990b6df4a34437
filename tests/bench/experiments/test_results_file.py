"""Files of rows: whole or not at all, read back as records, gone on from only under the same conditions."""

import json
from dataclasses import dataclass

import pytest

from bench.experiments.experiment import Experiment, line_by_line
from bench.experiments.registry import EXPERIMENTS
from bench.experiments.results_file import load_results, resumed_rows, save_rows
from planner.errors import FileFormatError
from planner.solve import Status


@dataclass(frozen=True, kw_only=True)
class ARow:
    a: int
    status: Status = Status.FITS


@dataclass(frozen=True, kw_only=True)
class BRow:
    b: float | None
    parts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    pairs: int
    batches: tuple[int, ...] = (1, 2)


THREE = Settings(pairs=3)
EITHER = Experiment(kind="either", rows=(ARow, BRow), table=line_by_line(("a",), lambda row: (str(row),)))
RESUMED = Experiment(kind="resumed", rows=(ARow,), table=EITHER.table, settings=Settings)


def test_rows_are_read_back_as_the_records_that_they_were(tmp_path):
    rows = [ARow(a=1), BRow(b=None, parts={"x": 2}), ARow(a=3, status=Status.NO_PLAN)]
    save_rows(tmp_path / "rows.json", EITHER, rows)
    experiment, results = load_results(tmp_path / "rows.json", [RESUMED, EITHER])
    assert experiment is EITHER
    assert results.rows == rows
    assert results.provenance.command.startswith("python -m bench")


def test_a_file_says_what_it_is_whatever_its_name(tmp_path):
    save_rows(tmp_path / "sweep_plans.json", EITHER, [ARow(a=1)])
    assert json.loads((tmp_path / "sweep_plans.json").read_text())["kind"] == "either"
    with pytest.raises(FileFormatError, match="rows of kind 'either'; there are resumed"):
        load_results(tmp_path / "sweep_plans.json", [RESUMED])


def test_every_experiment_is_registered_once_under_a_kind_of_its_own():
    assert len({experiment.kind for experiment in EXPERIMENTS}) == len(EXPERIMENTS)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"a": "one"}, "row 1.a: expected int, found 'one'"),
        ({"c": 1}, "row 1: unknown field 'c' for ARow"),
        ({}, "row 1: ARow lacks the field 'a'"),
        (7, "row 1: expected an object"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(tmp_path, row, said):
    file = tmp_path / "rows.json"
    save_rows(file, EITHER, [])
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": [row]}))
    with pytest.raises(FileFormatError, match=said):
        load_results(file, [EITHER])


def test_rows_are_resumed_only_under_the_same_settings_and_versions(tmp_path):
    file = tmp_path / "rows.json"
    assert resumed_rows(file, RESUMED, settings=THREE) == []
    save_rows(file, RESUMED, [ARow(a=1)], settings=THREE)
    assert resumed_rows(file, RESUMED, settings=THREE) == [ARow(a=1)]
    with pytest.raises(FileFormatError, match="made with pairs 3, not 5"):
        resumed_rows(file, RESUMED, settings=Settings(pairs=5))
    document = json.loads(file.read_text())
    document["versions"]["torch"] = "0.4"
    file.write_text(json.dumps(document))
    with pytest.raises(FileFormatError, match=r"made with torch '0\.4', not .*delete it or use another --out"):
        resumed_rows(file, RESUMED, settings=THREE)


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": []}', "{half"])
def test_a_file_that_holds_no_rows_is_refused_with_the_way_on(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    with pytest.raises(FileFormatError, match="delete it or use another --out"):
        resumed_rows(file, RESUMED, settings=THREE)


def test_rows_are_saved_where_there_is_no_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    save_rows(tmp_path / "rows.json", EITHER, [ARow(a=1)])
    assert json.loads((tmp_path / "rows.json").read_text())["commit"] == "unknown"


def test_saving_leaves_no_partial_file_behind(tmp_path):
    save_rows(tmp_path / "rows.json", EITHER, [])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
