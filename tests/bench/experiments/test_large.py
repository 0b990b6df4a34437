"""Models too large for this machine, as rows."""

from bench.experiments.large import COLUMNS, large_cells


def test_large_rows_are_shown_whole():
    row = dict.fromkeys(("planned_peak_bytes", "overhead", "gap"))
    row |= {
        "model": "m",
        "device": "T4",
        "ops": 5,
        "parameters": 10**6,
        "capture_s": 1.0,
        "capture_cpu_s": 1.0,
        "unplanned_peak_bytes": 9,
    }
    row |= {"budget": "50%", "status": "no plan", "plan_s": 1.0, "process_bytes": 2**30}
    assert len(large_cells(row)) == len(COLUMNS)
    assert large_cells(row)[-6:] == ("-", "-", "-", "1.0", "1.00 GiB", "T4")
