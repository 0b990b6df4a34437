"""A schedule as a graph of its own: what it takes of memory, and that nothing of it can be decided again."""

import pytest

import strategies
from planner.ir import Rerun
from planner.schedule import Run
from planner.simulator import simulate, unplanned
from planner.solve import Problem, solve
from planner.synthetic import layered, resnet_like, transformer, unet
from planner.unrolling import unrolled


@pytest.mark.parametrize(
    "graph", [transformer(3), unet(3), resnet_like((1, 2)), *(layered(40, seed=s) for s in range(4))]
)
@pytest.mark.parametrize("budget", ["50%", "70%", "100%"])
@pytest.mark.parametrize("in_place", [True, False])
def test_run_as_it_is_it_takes_what_the_schedule_takes_and_may_do_nothing_else(graph, budget, in_place):
    solution = solve(Problem.of(graph, budget, in_place=in_place), strategies.make("mutwo"))
    found = unrolled(graph, solution.schedule).graph.validate()
    assert unplanned(found).peak_bytes == simulate(graph, solution.schedule).peak_bytes
    assert len(found.ops) == len(solution.schedule.runs)
    assert {op.rerun for op in found.ops} == {Rerun.NEVER}


def test_values_are_found_again_as_they_are_before_an_op_and_in_the_end():
    graph = transformer(2)
    schedule = solve(Problem.of(graph, "50%"), strategies.make("mutwo")).schedule
    again = [step.op for step in schedule.steps if isinstance(step, Run) and "rerun" in step.kind.value]
    turn = next(op.id for op in graph.ops if op.phase.value == "backward")
    found = unrolled(graph, schedule, at=turn)
    value = graph.ops[again[0]].outputs[0]
    assert again
    assert found.before[value] != found.after[value]
    assert all(found.graph.values[found.after[v]].shape == graph.values[v].shape for v in graph.outputs)
