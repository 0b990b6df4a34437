"""What trust costs is measured stage by stage, on the user's own step."""

from dataclasses import fields

from bench.experiments.trust import COLUMNS, run_trust
from bench.workloads.spec import WorkloadSpec


def test_every_stage_and_the_check_are_timed_and_printed(capsys):
    (row,) = run_trust([WorkloadSpec(source="tests.bench.small:make", batch=8)])
    assert all(getattr(row, field.name) > 0 for field in fields(row) if field.name != "title")
    assert row.fastest_check_us <= row.check_us
    assert len(row.cells) == len(COLUMNS)
    assert "What trust costs" in capsys.readouterr().out
