"""`reserve="arena"` and budgets of reserved memory. On stand-ins of torch.cuda: they have not run on a GPU."""

from dataclasses import replace

import pytest
import torch

import strategies
from planner.allocator import Allocator, CachingAllocator
from planner.arena import arrange
from planner.errors import BudgetError, PlannerError
from planner.schedule import unplanned_schedule
from planner.solve import Problem, solve
from planner.synthetic import resnet_like
from profiler.backend.cpu import CpuBackend
from profiler.measuring.memory import OutOfMemory
from rewriter import budgets, checkpoint, checkpoint_model, reserving
from rewriter.budgets import OverBudget
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


# -- both doors, on a CPU that hands out memory as a GPU does ---------------------------------------------------------


@pytest.fixture
def gpu_memory(monkeypatch):
    """The CPU with PyTorch's caching allocator of GPUs in front of its memory; what was reserved ahead, in order."""
    asked = []
    monkeypatch.setattr(CpuBackend, "allocator", lambda self: Allocator.CACHING)
    monkeypatch.setattr(CpuBackend, "hold_in_one_piece", lambda self, nbytes: asked.append(nbytes))
    for room in (budgets, reserving):
        monkeypatch.setattr(room, "is_accelerator", lambda device: True)
    return asked


def wide():
    """Activations of more than a MiB each: small ones share a segment, whatever is planned."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.randn(8192, 64)


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def of_a_step(**options):
    model, batch = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    planned = checkpoint(train, model, optimizer, batch, show_progress=False, **options)
    planned(batch)
    return planned.solution


def of_a_model(**options):
    model, batch = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint_model(model, **options)
    for _ in range(3):
        train(model, optimizer, batch)
    assert model.planned.verification.exact
    return model.planned.solution


DOORS = pytest.mark.parametrize("door", [of_a_step, of_a_model])


@DOORS
def test_a_budget_of_reserved_memory_is_kept_at_both_doors(gpu_memory, door):
    roomy = door(budget="reserved:4GiB", strategy="mutwo")
    assert not roomy.plan.evictions
    limit = roomy.held.reserved_bytes - 2**20  # a segment has 20: less has to live in it, and the margin is left
    found = door(budget=f"reserved:{limit}", strategy="mutwo")
    assert found.plan.evictions
    assert found.held.reserved_bytes <= limit
    assert "reserved" in str(found)
    assert gpu_memory == []
    with pytest.raises(OverBudget, match=r"the GPU's allocator holds .* by simulation"):
        door(budget="reserved:6MiB", strategy="mutwo")


@DOORS
def test_an_arena_is_reserved_once_at_both_doors_and_told_where_it_costs_memory(gpu_memory, door, recwarn):
    found = door(budget="60%", strategy="mutwo", reserve="arena")
    assert gpu_memory == [arrange(found.problem.graph, found.schedule).nbytes]
    assert found.problem.reserves_ahead
    told = [str(w.message) for w in recwarn if "reserve='arena'" in str(w.message)]
    assert told == [line for line in [better_without(found)] if line]


def test_at_the_model_door_only_own_capture_reserves(gpu_memory):
    model, _ = wide()
    with pytest.raises(PlannerError, match="reserve is for own capture alone"):
        checkpoint_model(model, budget="60%", dynamic=True, reserve="arena")
    with pytest.raises(BudgetError, match="there is 'arena'"):
        checkpoint_model(model, budget="60%", reserve="all")
