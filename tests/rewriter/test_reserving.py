"""`reserve="arena"`: one piece of a GPU asked for ahead. On a stand-in of torch.cuda: it has not run on a GPU."""

from dataclasses import replace

import pytest
import torch

import strategies
from planner.allocator import Allocator, CachingAllocator
from planner.arena import arrange
from planner.errors import BudgetError
from planner.schedule import unplanned_schedule
from planner.solve import Problem, solve
from planner.synthetic import resnet_like
from profiler.measuring.memory import OutOfMemory
from rewriter import checkpoint
from rewriter.reserving import Reserve, better_without, read_reserve, reserve_arena
from tests.fake_cuda import FakeAllocator

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Recorded(FakeAllocator):
    """A GPU that notes what is asked of it, in order; `full` has no piece that is large enough."""

    def __init__(self, *, full=False, **more):
        super().__init__(**more)
        self.asked, self.full, self.memory = [], full, CachingAllocator()

    def empty_cache(self):
        self.asked.append("empty")

    def caching_allocator_alloc(self, nbytes, device):
        self.asked.append((nbytes, device))
        if self.full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return self.memory.allocate(nbytes)

    def caching_allocator_delete(self, piece):
        self.asked.append("let go")
        self.memory.free(piece)


def step():
    graph = resnet_like((1, 2, 1, 1))
    return graph, unplanned_schedule(graph)


def test_one_piece_as_large_as_the_arena_is_held_and_free():
    graph, schedule = step()
    gpu, nbytes = Recorded(), arrange(graph, schedule).nbytes
    assert reserve_arena(graph, schedule, GPU, api=gpu) == nbytes
    assert gpu.asked == ["empty", (nbytes, GPU), "let go"]
    assert gpu.memory.allocated_bytes == 0
    assert gpu.memory.reserved_bytes >= nbytes
    assert gpu.memory.device_requests == 1


def test_a_smaller_form_is_served_by_the_piece_that_is_there():
    graph, schedule = step()
    gpu = Recorded()
    assert reserve_arena(graph, schedule, GPU, held_bytes=1 << 40, api=gpu) == 1 << 40
    assert gpu.asked == []


def test_a_piece_that_would_not_help_is_told_with_the_numbers():
    graph, _ = step()
    problem = Problem(graph=graph, budget_bytes=1 << 50, allocator=Allocator.CACHING, reserves_ahead=True)
    solution = solve(problem, strategies.make("keep_all"))
    alone = replace(problem, reserves_ahead=False).held(solution.schedule)
    assert (better_without(solution) == "") == (solution.held.reserved_bytes <= alone.reserved_bytes)
    solution.__dict__["held"] = replace(alone, reserved_bytes=alone.reserved_bytes + 1)
    assert "leave it out, or set expandable_segments:True" in better_without(solution)


def test_a_card_without_such_a_piece_is_out_of_memory_in_one_sentence():
    with pytest.raises(OutOfMemory, match=r"reserving .* in one piece: CUDA out of memory"):
        reserve_arena(*step(), GPU, api=Recorded(full=True))


def test_what_cannot_be_reserved_is_told_before_anything_is_captured():
    assert read_reserve(None, CPU) is Reserve.NOTHING
    assert read_reserve("arena", GPU, Recorded()) is Reserve.ARENA
    with pytest.raises(BudgetError, match="there is 'arena'"):
        read_reserve("all", GPU, Recorded())
    with pytest.raises(BudgetError, match="not PyTorch's own caching one"):
        read_reserve("arena", GPU, Recorded(backend="cudaMallocAsync"))
    with pytest.raises(BudgetError, match="the model is on cpu"):
        checkpoint(print, torch.nn.Linear(1, 1), None, None, budget="60%", reserve="arena")
