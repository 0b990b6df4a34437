"""budget="auto" and budgets of reserved memory: a GPU is asked through a stand-in of torch.cuda."""

import pytest
import torch

import strategies
from planner.allocator import Allocator
from planner.errors import BudgetError
from planner.solve import Problem, solve
from planner.synthetic import chain
from profiler.measuring.memory import allocator_of
from rewriter.budgets import UNFORESEEN, auto_budget, bounds_reserved, check_budget, over_budget
from rewriter.pipeline import Limit
from tests.fake_cuda import FakeAllocator

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def test_it_is_the_start_and_all_that_is_free_or_cached_less_what_is_unforeseen():
    graph = chain(3)
    budget = auto_budget(graph, GPU, FakeAllocator())
    assert budget == graph.start_bytes + 600 + 50 - UNFORESEEN * 1000


def test_on_the_cpu_it_is_refused_with_what_to_say_instead():
    with pytest.raises(BudgetError, match="say bytes or a share"):
        auto_budget(chain(3), CPU, FakeAllocator())


def test_a_reserved_budget_on_the_cpu_is_refused_before_anything_is_captured():
    with pytest.raises(BudgetError, match="for the allocator of a GPU, but the model is on cpu"):
        check_budget("reserved:4GiB", CPU)


@pytest.mark.parametrize("budget", ["auto", "reserved:4GiB"])
def test_an_allocator_that_is_not_known_is_named(budget):
    check_budget(budget, GPU, FakeAllocator())
    with pytest.raises(BudgetError, match="is none that can be simulated"):
        check_budget(budget, GPU, FakeAllocator(backend="cudaMallocAsync"))


def test_who_hands_out_memory_is_asked_of_the_device():
    assert allocator_of(CPU) is None
    assert allocator_of(GPU, FakeAllocator()) is Allocator.CACHING
    assert allocator_of(GPU, FakeAllocator(expandable=True)) is Allocator.EXPANDABLE


def test_auto_and_reserved_budgets_are_for_all_that_the_allocator_holds():
    assert bounds_reserved("auto")
    assert bounds_reserved("reserved:4GiB")
    assert not bounds_reserved("4GiB")
    assert not bounds_reserved(4)
    limit = Limit(nbytes=1000, margin_bytes=100, allocator=Allocator.CACHING, reserved=True)
    problem = limit.problem(chain(3), time_limit_s=1.0, in_place=True)
    assert (problem.budget_bytes, problem.most_reserved_bytes) == (900, 900)


def test_on_a_gpu_every_plan_says_what_would_be_reserved():
    limit = Limit(nbytes=10**9, margin_bytes=0, allocator=Allocator.CACHING)
    solution = solve(limit.problem(chain(3), time_limit_s=1.0, in_place=True), strategies.make("mutwo"))
    assert solution.held.reserved_bytes == 2 * 2**20  # one small segment has room for all of it
    assert "2.0 MiB reserved" in str(solution)


def test_a_reserved_budget_that_cannot_be_met_says_what_would_be_held():
    problem = Problem.of(chain(3), "reserved:1MiB")
    refusal = over_budget(solve(problem, strategies.make("mutwo")), problem.budget_bytes, 0)
    assert "the GPU's allocator holds 2.0 MiB by simulation" in str(refusal)
