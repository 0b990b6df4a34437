"""Peaks at a batch that was never captured."""

from bench.experiments.scaled import COLUMNS, ScaledRow, scaled_cells, scaled_row
from bench.workloads.spec import WorkloadSpec


def test_tensors_scale_exactly_and_the_peak_is_within_a_percent_of_the_allocators():
    row = scaled_row(WorkloadSpec(source="tests.bench.small:make", batch=8))
    assert row.from_batches == (2, 4)
    assert row.tensors_exact
    assert abs(row.captured_bytes / row.allocator_bytes - 1) < 0.01
    assert abs(row.scaled_bytes / row.allocator_bytes - 1) < 0.01


def test_cells_give_either_prediction_relative_to_the_meter():
    row = ScaledRow(
        model="m b8", batch=8, from_batches=(2, 4), scaled_bytes=202, captured_bytes=200, allocator_bytes=200,
        tensors_exact=True,
    )  # fmt: skip
    cells = dict(zip(COLUMNS, scaled_cells(row), strict=True))
    assert scaled_cells(row)[3] == "+1.00%"
    assert (cells["from batches"], cells["tensors exact"]) == ("2 and 4", "yes")
