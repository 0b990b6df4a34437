"""Models too large for this machine, as rows."""

from bench.experiments.large import COLUMNS, LargeRow, large_cells
from planner.solve import Status


def test_large_rows_are_shown_whole():
    row = LargeRow(
        model="m", device="T4", ops=5, parameters=10**6, capture_s=1.0, capture_cpu_s=1.0, start_bytes=1,
        unplanned_peak_bytes=9, budget="50%", status=Status.NO_PLAN, planned_peak_bytes=None, overhead=None, gap=None,
        plan_s=1.0, process_bytes=2**30,
    )  # fmt: skip
    assert len(large_cells(row)) == len(COLUMNS)
    assert large_cells(row)[-6:] == ("-", "-", "-", "1.0", "1.00 GiB", "T4")
