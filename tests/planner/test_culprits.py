"""What makes a peak, and why moving to the host does not lower it."""

from dataclasses import replace

import pytest

from planner.culprits import idle_at_peak, where_the_peak_is, why_nothing_moves
from planner.host_link import HostLink
from planner.ir import Graph
from planner.plan import recompute_once
from planner.schedule import lower, unplanned_schedule
from planner.simulator import simulate
from planner.solve import Problem, solve
from planner.synthetic import chain, residual_tower
from strategies.keep_all import KeepAll
from tests.small import names, read_twice, storages

LINK = HostLink.of(24)


def why(graph: Graph, schedule, **more) -> str:
    given = {"host_budget_bytes": None} | more
    return why_nothing_moves(graph, schedule, simulate(graph, schedule), LINK, **given)


def test_an_op_of_the_backward_that_makes_the_peak_alone_is_named_with_its_tensors():
    graph = read_twice()  # at its largest in mid_bw, when f is in use again
    schedule = unplanned_schedule(graph)
    assert idle_at_peak(graph, schedule, simulate(graph, schedule)) == ()
    assert why(graph, schedule).startswith(
        "it would not lower the peak, which lies in op 'mid_bw' with its own mid_bw 200 B, g_bw 30 B; op "
    )


def test_a_peak_in_the_recomputation_is_called_that():
    graph = residual_tower(2)
    schedule = lower(graph, recompute_once(graph, storages(graph, "stem", "b0_conv", "b0_relu", "b1_conv", "b1_relu")))
    timeline = simulate(graph, schedule)
    at = next(i for i, step in enumerate(schedule.steps) if "rerun" in str(step).lower())
    assert "in the recomputation of op" in where_the_peak_is(graph, schedule, replace(timeline, peak_step=at))


def test_what_lies_idle_at_the_peak_could_be_moved():
    graph = chain(4)
    schedule = unplanned_schedule(graph)
    idle = idle_at_peak(graph, schedule, simulate(graph, schedule))
    assert "f0" in names(graph, idle)
    assert why(graph, schedule) == "nothing was found that would be cheaper over 24 GB/s"
    assert why(graph, schedule, host_budget_bytes=1).startswith("the host may hold 1 B, and the smallest activation")
    assert why(graph, schedule, host_budget_bytes=150).endswith(
        f"where {100 * len(idle)} B idle at the peak and the host may hold 150 B (host_budget)"
    )
    assert why(graph, schedule, host_budget_bytes=100 * len(idle)).endswith("cheaper over 24 GB/s")


@pytest.mark.parametrize(("link", "said"), [(None, ""), (LINK, "nothing was found")])
def test_a_solution_tells_it_only_where_there_is_a_link(link, said):
    problem = Problem(graph=chain(4), budget_bytes=1 << 20, host_link=link)
    assert solve(problem, KeepAll()).why_nothing_moves.startswith(said)
