"""Moves to files, carried out: rows with what was predicted and what was measured."""

import pytest

from bench.__main__ import main
from bench.experiments.moves import COLUMNS, MOVES, moved_cells, moved_row
from bench.experiments.prepared import prepared
from bench.experiments.registry import load
from bench.experiments.results_file import save_rows
from bench.workloads.spec import WorkloadSpec


@pytest.fixture(scope="module")
def ready():
    return prepared(WorkloadSpec(source="tests.bench.small:make", batch=8), ["60%"])


@pytest.mark.parametrize("speed", [None, 0.5])
def test_the_peak_is_the_predicted_one_however_slow_the_disk_is(ready, tmp_path, speed):
    row = moved_row(ready, tmp_path, strategy="offload_only", budget="60%", speed=speed, rounds=2)
    assert row.exact
    assert row.tensors > 0
    assert abs(row.predicted_peak_bytes / row.measured_peak_bytes - 1) <= 0.005
    assert row.held_to_gb_per_s == speed
    assert list(tmp_path.iterdir()) == []
    save_rows(tmp_path / "moves.json", MOVES, [row])
    assert load(tmp_path / "moves.json")[1].rows == [row]
    assert len(moved_cells(row)) == len(COLUMNS)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--offload-dir", "no/such/folder"], "there is no such folder"),
        (["--held-to", "0"], "give a speed above 0"),
        (["--held-to", "24/12"], "one speed for both ways"),
        (["--held-to", ","], "names none"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_captured(capsys, given, says):
    assert main(["moves", *given]) == 2
    assert says in capsys.readouterr().err
