"""PyTorch's caching allocator, simulated: rounding, pools, splitting, joining; and budgets of what it holds."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from planner import allocator
from planner.allocator import Allocator, CachingAllocator, held, rounded, segment_bytes
from planner.arena import arrange
from planner.errors import BudgetError
from planner.schedule import unplanned_schedule
from planner.simulator import unplanned
from planner.solve import Problem, Status, solve, solve_if_needed
from planner.synthetic import Builder
from planner.units import parse_budget, read_budget
from tests.graphs import networks
from tests.reference import NaiveAllocator
from tests.small import BACKWARD

MIB = 2**20
SIZES = st.one_of(
    st.sampled_from([1, 512, 513, MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 21 * MIB]), st.integers(1, 40 * MIB)
)
# Allocations, and frees of the n-th that is there.
TRAFFIC = st.lists(st.one_of(SIZES, st.integers(-20, -1)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(TRAFFIC, st.booleans())
def test_it_holds_what_the_naive_allocator_holds(traffic, expandable):
    mine, naive = CachingAllocator(expandable=expandable), NaiveAllocator(expandable=expandable)
    live = []
    for i, request in enumerate(traffic):
        if request > 0:
            live.append((i, mine.allocate(request)))
            naive.allocate(i, request)
        elif live:
            owner, piece = live.pop(request % len(live))
            mine.free(piece)
            naive.free(owner)
        assert (mine.reserved_bytes, mine.allocated_bytes) == (naive.reserved_bytes, naive.allocated_bytes)
    spans = sorted((piece.address, piece.address + piece.nbytes) for _, piece in live)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@settings(max_examples=50, deadline=None)
@given(networks(), st.sampled_from(Allocator))
def test_it_never_holds_less_than_lives(graph, kind):
    found = held(graph, unplanned_schedule(graph), allocator=kind)
    assert found.reserved_bytes >= found.allocated_bytes >= unplanned(graph).peak_bytes


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [(1, 512, 2 * MIB), (MIB, MIB, 2 * MIB), (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
     (10 * MIB, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512, 12 * MIB)],
)  # fmt: skip
def test_requests_are_rounded_and_get_segments_of_the_sizes_of_pytorch(nbytes, block, segment):
    assert (rounded(nbytes), segment_bytes(rounded(nbytes))) == (block, segment)


def test_the_constants_are_those_of_the_installed_pytorch():
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    text = header.read_text(encoding="utf-8")
    there = {name: int(value) for name, value in re.findall(r"constexpr size_t (k\w+) = (\d+);", text)}
    assert there["kMinBlockSize"] == allocator.BLOCK_BYTES
    assert there["kSmallSize"] == allocator.SMALL_BYTES
    assert there["kSmallBuffer"] == allocator.SMALL_SEGMENT_BYTES
    assert there["kMinLargeAlloc"] == allocator.OWN_SEGMENT_BYTES
    assert there["kRoundLarge"] == allocator.ROUND_BYTES
    assert f"large_segment_size_{{{allocator.LARGE_SEGMENT_BYTES}}}" in text


def test_more_steps_hold_no_more_than_what_is_said():
    graph = large_chain()
    schedule = unplanned_schedule(graph)
    assert held(graph, schedule) == held(graph, schedule, steps=40)
    assert held(graph, schedule).reserved_bytes >= held(graph, schedule, steps=1).reserved_bytes


def test_one_piece_reserved_ahead_serves_all_that_is_large():
    graph = large_chain()
    schedule = unplanned_schedule(graph)
    ahead_bytes = arrange(graph, schedule).nbytes
    alone, ahead = held(graph, schedule), held(graph, schedule, ahead_bytes=ahead_bytes)
    assert ahead.reserved_bytes >= max(ahead_bytes, ahead.allocated_bytes)
    assert ahead.requests < alone.requests
    asked = Problem(graph=graph, budget_bytes=1, allocator=Allocator.CACHING, reserves_ahead=True)
    assert asked.held(schedule) == ahead
    with pytest.raises(BudgetError, match="needs to know the allocator"):
        Problem(graph=graph, budget_bytes=1, reserves_ahead=True)


def test_a_hole_between_blocks_is_what_a_larger_block_cannot_use():
    memory = CachingAllocator()
    first, _, third = (memory.allocate(6 * MIB) for _ in range(3))
    memory.free(first)
    memory.free(third)
    memory.allocate(9 * MIB)  # 8 MiB are free at the end, and 6 at the beginning, of one segment of 20
    assert memory.reserved_bytes == 40 * MIB
    assert memory.device_requests == 2


def test_an_expandable_segment_grows_where_a_hole_does_not_serve():
    memory = CachingAllocator(expandable=True)
    first, _, third = (memory.allocate(6 * MIB) for _ in range(3))
    memory.free(first)
    memory.free(third)
    memory.allocate(30 * MIB)  # from the free end on
    assert memory.reserved_bytes == 60 * MIB


def large_chain():
    b = Builder("large-chain")
    x = b.input("x", 3 * MIB)
    made = [b.one("f0", [x], 3 * MIB, time_us=10.0)]
    for i in range(1, 12):
        made.append(b.one(f"f{i}", [made[-1]], (3 + i % 4) * MIB, time_us=10.0))
    gradient = b.one("loss_bw", [made[-1]], MIB, **BACKWARD)
    for i in reversed(range(12)):
        gradient = b.one(f"f{i}_bw", [gradient, made[i]], (3 + i % 4) * MIB, **BACKWARD)
    b.outputs.append(gradient)
    return b.build()


def test_a_budget_of_reserved_memory_is_met_in_what_the_allocator_holds():
    graph = large_chain()
    all_reserved = held(graph, unplanned_schedule(graph)).reserved_bytes
    limit = all_reserved - 20 * MIB
    live = solve(Problem.of(graph, limit), strategies.make("mutwo"))
    assert held(graph, live.schedule).reserved_bytes > limit, "the test shows nothing where live bytes alone do it"
    found = solve(Problem.of(graph, f"reserved:{limit}"), strategies.make("mutwo"))
    assert found.status is Status.FITS
    assert found.held.reserved_bytes <= limit
    assert found.problem.budget_bytes == limit
    assert "reserved" in str(found)
    assert "reserved" in found.reason


def test_a_budget_just_below_what_is_held_is_met_though_memory_is_given_up_in_whole_segments():
    graph = large_chain()
    limit = held(graph, unplanned_schedule(graph)).reserved_bytes - MIB // 2
    found = solve(Problem.of(graph, f"reserved:{limit}"), strategies.make("mutwo"))
    assert found.status is Status.FITS
    assert found.held.reserved_bytes <= limit - 10 * MIB


def test_what_is_over_a_reserved_budget_says_so_even_where_its_live_bytes_fit():
    graph = large_chain()
    found = solve(Problem.of(graph, f"reserved:{graph.start_bytes + 12 * MIB}"), strategies.make("keep_all"))
    assert found.status is Status.OVER_BUDGET
    assert "reserved, of at most" in found.reason


def test_a_step_within_its_reserved_budget_runs_unplanned_and_one_just_over_does_not():
    graph = large_chain()
    reserved = held(graph, unplanned_schedule(graph)).reserved_bytes
    assert not solve_if_needed(Problem.of(graph, f"reserved:{reserved}"), strategies.make("mutwo")).plan.evictions
    assert solve_if_needed(Problem.of(graph, f"reserved:{reserved - 1}"), strategies.make("mutwo")).plan.evictions


def test_a_bound_proven_for_more_memory_is_kept_and_one_for_less_is_not():
    graph = large_chain()
    limit = held(graph, unplanned_schedule(graph)).reserved_bytes - 20 * MIB
    whole = solve(Problem.of(graph, limit), strategies.make("ilp"))
    found = solve(Problem.of(graph, f"reserved:{limit}"), strategies.make("ilp"))
    assert found.plan.lower_bound_us == whole.plan.lower_bound_us
    assert found.plan.lower_bound_us <= found.timeline.recompute_us


def test_without_an_allocator_nothing_is_said_of_reserved_memory():
    found = solve(Problem.of(large_chain(), "80%"), strategies.make("mutwo"))
    assert found.held is None
    assert "reserved" not in str(found)


@pytest.mark.parametrize(
    ("budget", "says"),
    [("reserved:60%", "is said in bytes"), ("cached:4GiB", "no budget of kind 'cached'"), ("reserved:", "give bytes"),
     ("reserved:0", "nothing runs in no memory"), ("reserved:reserved:4GiB", "give bytes")],
)  # fmt: skip
def test_a_budget_of_a_kind_that_does_not_exist_is_told(budget, says):
    with pytest.raises(BudgetError, match=says):
        read_budget(budget)


def test_reserved_bytes_are_read_like_others():
    assert parse_budget(" Reserved: 4GiB", start_bytes=1, peak_bytes=2) == 4 * 2**30


def test_a_limit_on_what_nobody_holds_is_refused():
    with pytest.raises(BudgetError, match="needs to know the allocator"):
        Problem(graph=large_chain(), budget_bytes=1, most_reserved_bytes=1)
