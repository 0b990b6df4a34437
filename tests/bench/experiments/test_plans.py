"""Strategies on graphs, as rows and as a table."""

from bench.experiments.plans.rows import COLUMNS, PlanRow, compare_graph, plans_table
from planner.solve import Status
from planner.synthetic import residual_tower


def plan_row(strategy, **given):
    row = {
        "graph": "g", "strategy": strategy, "budget": "50%", "budget_bytes": 150, "status": Status.FITS,
        "unplanned_peak_bytes": 200, "start_bytes": 100, "peak_bytes": 150, "recompute_us": 1.0, "overhead": 0.1,
        "dropped": 2, "gap": None, "found_by": "", "cut_off": False, "solve_s": 1.0, "solve_cpu_s": 0.5,
        "times": "made up", "reason": "", "note": "",
    }  # fmt: skip
    return PlanRow(**row | given)


def test_a_table_of_plans_says_who_won_and_what_the_program_reached_alone():
    columns, lines = plans_table(
        [
            plan_row("mutwo"),
            plan_row("ilp", gap=0.004, found_by="polish"),
            plan_row("ilp:seeds=false", gap=0.02, overhead=0.12, solve_cpu_s=2.5),
            plan_row("ilp", budget="40%", gap=0.0, found_by="mutwo"),
            plan_row("ilp:seeds=false", budget="40%", status=Status.OVER_BUDGET),
        ]
    )
    assert columns == COLUMNS
    assert [" | ".join(line) for line in lines] == [
        "g | 50% | mutwo | fits | 50.0% | 10.00% | - | 1.00 | 0.50 | - | -",
        "g | 50% | ilp | fits | 50.0% | 10.00% | 0.40% | 1.00 | 0.50 | polish | 12.00%, gap 2.00%, 2.5 CPU s",
        "g | 40% | ilp | fits | 50.0% | 10.00% | 0.00% | 1.00 | 0.50 | mutwo | over budget, 0.5 CPU s",
    ]


def test_a_row_holds_what_the_judge_said_without_the_graph():
    kept, planned = (
        PlanRow.of(row) for row in compare_graph(residual_tower(5), ["keep_all", "mutwo"], ["80%"], time_limit_s=1)
    )
    assert (kept.status, planned.status) == (Status.OVER_BUDGET, Status.FITS)
    assert planned.peak_bytes <= planned.budget_bytes < kept.peak_bytes == kept.unplanned_peak_bytes
    assert planned.dropped > 0
