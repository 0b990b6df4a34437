"""`python -m bench ablation`: every variant is judged on the step itself, and taking a part away never helps."""

import pytest

from bench.__main__ import main
from bench.experiments.ablation import VARIANTS, ablation_table, run_ablation
from bench.experiments.prepared import roofline_graph
from bench.experiments.registry import load
from bench.workloads.spec import WorkloadSpec

SMALL = WorkloadSpec(source="tests.bench.small:make", batch=64)
NO_SOLVER = "no solver: the greedy"


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    graphs = {}

    def graph_of(spec):
        graphs[spec] = roofline_graph(spec)
        return graphs[spec]

    file = tmp_path_factory.mktemp("ablation") / "rows.json"
    return run_ablation([SMALL], budget="60%", time_limit_s=1.0, out=file, graph_of=graph_of), file, graphs


def test_every_part_has_a_row_and_rows_are_read_back(ablated):
    rows, file, _ = ablated
    assert [row.variant for row in rows] == [variant.name for variant in VARIANTS]
    assert list(load(file)[1].rows) == rows


def test_the_whole_fits_and_no_plan_that_lacks_a_part_is_cheaper(ablated):
    rows = {row.variant: row for row in ablated[0]}
    whole = rows["everything"]
    assert whole.fits
    for name, row in rows.items():
        if name.startswith("no ") and row.fits:
            assert row.overhead >= whole.overhead - 1e-9, name
    assert rows["and the host"].overhead <= whole.overhead + 1e-9


def test_a_plan_made_by_an_estimate_is_judged_by_the_simulator(ablated):
    rows, _, graphs = ablated
    assert len(graphs) == 2  # as it is, and with early updates
    blind, greedy = (next(row for row in rows if row.variant == name) for name in ("no simulation", NO_SOLVER))
    assert blind.overhead <= greedy.overhead  # it stops sooner, or at the same pick
    assert blind.fits == (blind.peak_bytes <= blind.budget_bytes)


def test_the_table_has_a_line_a_variant_and_says_what_is_over(ablated):
    columns, lines = ablation_table(ablated[0])
    assert columns[2:] == (SMALL.title,)
    over = [row.variant for row in ablated[0] if row.peak_bytes is not None and not row.fits]
    assert [line[0] for line in lines if "over by" in line[2]] == over


def test_two_budgets_are_one_line(capsys):
    assert main(["ablation", "--budget", "50%,60%"]) == 2
    assert "--budget takes one here, not 2" in capsys.readouterr().err
