"""Ranks that train together: an error of one is an error of all, in a sentence, and none hangs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from planner.plan import Plan
from planner.solve import Problem
from planner.synthetic import residual_tower
from profiler.collectives import sequence_of
from profiler.measuring import collective_times
from profiler.measuring.collective_times import CollectiveCost
from rewriter import checkpoint, pipeline
from rewriter.agreement import Alone, Figures, Group, agree, largest, slowest, structure
from tests.ranks import on_ranks, told_by

SHORT_S = 6.0


def step(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(width: int = 8) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(256, width)


def planned(model: Any, optimizer: Any, batch: Any, train_step: Any = step, **options: Any) -> Any:
    options = {"budget": "70%", "strategy": "mutwo", "verify": False, "show_progress": False, **options}
    return checkpoint(train_step, model, optimizer, batch, **options)


class Failing:
    """A strategy that cannot plan."""

    name: ClassVar[str] = "failing"

    def plan(self, problem: Problem) -> Plan:
        raise ValueError("out of ideas")


def _fails_to_plan(rank: int) -> None:
    planned(*made(), strategy=Failing())


def test_a_strategy_that_fails_on_rank_0_is_the_same_error_on_all() -> None:
    first, second = told_by(_fails_to_plan)
    assert first.error.startswith("StrategyError: failing: plan() raised ValueError: out of ideas")
    assert second.error == f"StrategyError: planning the step failed on rank 0: {first.error}"


def _fails_to_capture(rank: int) -> None:
    def odd(model: Any, optimizer: Any, batch: Tensor) -> Any:
        step(model, optimizer, batch)
        return {1, 2} if rank == 1 else None

    planned(*made(), train_step=odd)


def test_a_step_that_cannot_be_captured_on_one_rank_is_refused_on_all() -> None:
    first, second = told_by(_fails_to_capture)
    assert second.error.startswith("CaptureError: ")
    assert first.error == f"CaptureError: capturing the step failed on rank 1: {second.error}"


def _other_model(rank: int) -> None:
    def twice(model: Any, optimizer: Any, batch: Tensor) -> Tensor:
        return step(model, optimizer, batch * 2)

    planned(*made(), train_step=twice if rank == 1 else step)


def test_ranks_with_other_steps_are_told_so_before_anything_runs() -> None:
    for one in told_by(_other_model):
        assert one.error.startswith("RankError: the captured step of rank 1 differs from rank 0's")


def _one_collective_more(rank: int) -> None:
    def with_another(graph: Any) -> tuple[str, ...]:
        return (*sequence_of(graph), "all_reduce")

    if rank == 1:
        pipeline.sequence_of = with_another
    planned(*made(), budget="100%")


def test_ranks_that_would_communicate_otherwise_are_told_so_before_the_first_step() -> None:
    for one in told_by(_one_collective_more):
        assert one.error.startswith("RankError: the sequence of collectives of rank 1 differs from rank 0's")


def _fails_at(stage: str, rank: int) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise ValueError("no more")

    if rank == 1:
        setattr(pipeline, stage, fails)
    planned(*made(), budget="200%", verify=stage == "compare")


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("measure_within", "measuring the step"),
        ("apply", "rewriting the step"),
        ("compare", "proving the planned step"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_at_the_same_stage(stage: str, said: str) -> None:
    first, second = told_by(partial(_fails_at, stage))
    assert "ValueError: no more" in second.error
    assert first.error.startswith(f"RankError: {said} failed on rank 1: ")


def _dies(rank: int) -> None:
    model, optimizer, batch = made()
    found = planned(model, optimizer, batch, budget="100%")
    found(batch)
    if rank == 1:
        os._exit(9)
    found(batch)


def test_a_rank_that_dies_leaves_the_others_with_a_sentence() -> None:
    first, second = told_by(_dies)
    assert second.lost
    assert first.error.startswith(
        "RankError: rank 0 was left alone in the middle of a step: another rank has ended; see what it says. Some of"
    )
    assert "direct cause" in first.trace, "what gloo said of sockets"


def _stays_away(rank: int) -> None:
    if rank == 0:
        planned(*made())
    else:
        made()


def test_a_rank_that_stays_away_is_named_when_the_time_is_over() -> None:
    first, second = told_by(_stays_away, timeout_s=SHORT_S)
    assert not second.error
    assert first.error.startswith(
        f"RankError: capturing the step: rank 1 did not come within the group's time-out of {SHORT_S:.0f} s"
    )


def _raises_while_measuring(rank: int) -> None:
    """Rank 1 fails between two collectives, where rank 0 waits for it."""
    _, _, batch = made()
    ranks = Group(dist.group.WORLD, torch.device("cpu"))
    with ranks.together("measuring the step"):
        if rank == 1:
            raise MemoryError("no more")
        dist.all_reduce(batch)


def test_a_rank_that_fails_between_two_collectives_is_the_reason_that_all_give() -> None:
    first, second = told_by(_raises_while_measuring, timeout_s=SHORT_S)
    assert second.error == "MemoryError: no more"
    assert first.error == "RankError: measuring the step failed on rank 1: MemoryError: no more"


def _goes_on(rank: int) -> list[Any]:
    """After an error of all, they still speak to each other."""
    ranks = Group(dist.group.WORLD, torch.device("cpu"))
    said = []
    for failing, error in ((0, ValueError("once")), (1, ValueError("once")), (1, KeyboardInterrupt())):
        try:
            with ranks.together("a stage"):
                ranks.gathered("inside it", rank)
                if rank == failing:
                    raise error
                ranks.gathered("further inside", rank)
        except BaseException as raised:
            said.append(type(raised).__name__)
    agree(ranks, "the weather", "fine", otherwise="never")
    return [said, ranks.gathered("the end", rank), ranks.fits_all([True, rank == 0])]


def test_ranks_speak_on_after_an_error() -> None:
    first, second = on_ranks(_goes_on)
    assert first == [["ValueError", "RankError", "RankError"], [0, 1], [True, False]]
    assert second == [["RankError", "ValueError", "KeyboardInterrupt"], [0, 1], [True, False]]


def _other_budgets(rank: int) -> tuple[Any, ...]:
    """Ranks with budgets of their own, whose collectives take longer and more from rank to rank."""
    cost = CollectiveCost(time_us=1000.0 * (1 + rank), scratch_bytes=64 * (1 + rank))
    collective_times._measured = lambda *_: cost  # of this rank, a process of its own
    found = planned(*made(), budget=("100%", "90%")[rank])
    form = found._forms[0]
    common, own = form.ready.planned_on, form.ready.graph
    slowest_us = {graph.ops[wait].time_us for graph in (common, own) for wait in graph.wait_of.values()}
    scratch = [{graph.ops[launch].workspace_bytes for launch in graph.wait_of} for graph in (common, own)]
    return found.solution.problem.budget_bytes, form.planned.collectives, slowest_us, *scratch


def test_ranks_run_one_plan_within_the_smallest_budget_for_the_slowest_and_largest_collectives() -> None:
    first, second = on_ranks(_other_budgets)
    assert first[:-1] == second[:-1]
    assert first[2:] == ({2000.0}, {128}, {64})
    assert second[-1] == {128}


def _elsewhere(rank: int) -> None:
    ranks = Group(dist.group.WORLD, torch.device("cpu"))
    ranks.gathered("one thing" if rank == 0 else "another", rank)


def test_ranks_at_different_stages_are_told_of_both() -> None:
    for one in told_by(_elsewhere):
        assert one.error.startswith("RankError: rank 0 is at 'one thing' and rank 1 at 'another'")


# -- without processes ----------------------------------------------------------------------------------------------


def test_one_process_agrees_with_itself() -> None:
    alone = Alone()
    with alone.together("anything"):
        agree(alone, "its own word", [1, 2], otherwise="never")
    assert alone.fits_all([True, False]) == [True, False]


def test_the_common_graph_is_the_largest_and_slowest_op_by_op() -> None:
    small, large = residual_tower(3, nbytes=100), residual_tower(3, nbytes=200)
    assert structure(small) == structure(large)
    figures = [Figures.of(small), Figures.of(large)]
    common = largest(slowest(small, figures), figures)
    assert [s.nbytes for s in common.storages] == [s.nbytes for s in large.storages]
    assert all(c.time_us == max(a.time_us, b.time_us) for a, b, c in zip(small.ops, large.ops, common.ops, strict=True))


@pytest.mark.parametrize("more", [1, 2])
def test_graphs_of_other_ops_have_another_structure(more: int) -> None:
    assert structure(residual_tower(3)) != structure(residual_tower(3 + more))
