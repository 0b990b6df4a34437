"""One arena for a step: nothing lies on what is still in use, and little more is taken than lives at once."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strategies
from planner.arena import Arena, arrange, check_arena
from planner.blocks import Block, blocks, start_sizes
from planner.errors import PlanError
from planner.ir import Graph
from planner.plan import recompute_each_time, recompute_once
from planner.schedule import Free, Schedule, lower, unplanned_schedule
from planner.simulator import simulate, unplanned
from planner.solve import Problem, solve
from planner.synthetic import Builder, resnet_like
from tests.graphs import networks_with_drops
from tests.reference import naive_bytes

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MAKERS = (recompute_once, recompute_each_time)
many = settings(max_examples=100, deadline=None)


class Bytes:
    """An arena byte by byte: who wrote each last. Reads the schedule by itself, and offsets by storage and step."""

    def __init__(self, graph: Graph, arena: Arena) -> None:
        self.graph, self.owner = graph, [-1] * arena.nbytes
        self.offset = {
            tenant: offset
            for block, offset in zip(arena.blocks, arena.offsets, strict=True)
            for tenant in block.tenants
        }
        self.own = {
            (block.first_step, i): (offset, block.nbytes)
            for i, (block, offset) in enumerate(zip(arena.blocks, arena.offsets, strict=True))
            if not block.tenants
        }
        self.lies_at: dict[int, int] = {}

    def run(self, schedule: Schedule) -> None:
        for position, step in enumerate(schedule.steps):
            if isinstance(step, Free):
                self.lies_at.pop(step.storage, None)
                continue
            for storage in self.graph.reads[step.op]:
                self.check(storage, position)
            made = [*self.graph.makes[step.op], self.graph.ops[step.op].rng_state]
            for storage in made:
                if (storage, position) in self.offset:
                    self.write(storage, self.offset[storage, position])
            for (at, _), (offset, nbytes) in self.own.items():
                if at == position:
                    self.owner[offset : offset + nbytes] = [-1] * nbytes
            if step.into is not None:
                self.lies_at.pop(step.into, None)
            for storage in list(self.lies_at):
                self.check(storage, position)

    def write(self, storage: int, offset: int) -> None:
        nbytes = self.graph.storages[storage].nbytes
        self.lies_at[storage] = offset
        self.owner[offset : offset + nbytes] = [storage] * nbytes

    def check(self, storage: int, position: int) -> None:
        offset, nbytes = self.lies_at.get(storage, 0), self.graph.storages[storage].nbytes
        if storage in self.lies_at:
            assert set(self.owner[offset : offset + nbytes]) <= {storage}, f"lost before step {position}"


@many
@given(networks_with_drops(), st.sampled_from(MAKERS), st.booleans())
def test_in_an_arena_nothing_is_overwritten_while_it_is_needed(drawn, make, in_place):
    graph, dropped = drawn
    schedule = lower(graph, make(graph, dropped), in_place=in_place)
    arena = arrange(graph, schedule, alignment_bytes=1)
    Bytes(graph, arena).run(schedule)
    assert arena.live_bytes == simulate(graph, schedule).above_start_bytes


@many
@given(networks_with_drops(), st.sampled_from(MAKERS), st.booleans())
def test_blocks_add_up_to_what_the_naive_simulator_counts(drawn, make, in_place):
    graph, dropped = drawn
    schedule = lower(graph, make(graph, dropped), in_place=in_place)
    found = blocks(graph, schedule)
    counted = [
        graph.start_bytes + sum(b.nbytes for b in found if b.first_step <= step <= b.last_step)
        for step in range(len(schedule.steps))
    ]
    assert counted == naive_bytes(graph, schedule)
    assert sum(start_sizes(graph)) == graph.start_bytes


def test_an_op_that_writes_over_its_input_stays_in_the_block():
    b = Builder("in-place")
    x = b.one("x", [b.input("w", 8)], 100)
    y = b.one("relu", [x], 100, overwritable=(x,))
    b.outputs.append(b.one("loss", [y], 4))
    graph = b.build()
    shared, other = blocks(graph, unplanned_schedule(graph))
    assert [graph.storage_names[s] for s, _ in shared.tenants] == ["x", "relu"]
    assert (shared.nbytes, other.nbytes) == (100, 4)
    assert len(blocks(graph, unplanned_schedule(graph, in_place=False))) == 3


@pytest.mark.parametrize("name", ["resnet152", "bert"])
@pytest.mark.parametrize("budget", ["100%", "50%", "30%"])
def test_the_arena_of_a_real_network_is_within_half_a_percent_of_its_peak(name, budget):
    graph = Graph.load(RESULTS / name / "graph.json")
    solution = solve(Problem.of(graph, budget), strategies.make("mutwo"))
    arena = arrange(graph, solution.schedule)
    assert arena.nbytes <= 1.005 * solution.timeline.above_start_bytes


def test_the_same_schedule_gives_the_same_arena():
    graph = resnet_like((1, 1, 2, 1))
    schedule = unplanned_schedule(graph)
    assert arrange(graph, schedule) == arrange(graph, schedule)
    assert arrange(graph, schedule).nbytes >= unplanned(graph).above_start_bytes


def test_a_step_that_makes_nothing_needs_no_arena():
    b = Builder("nothing")
    b.op("look", [b.input("x", 8)], [])
    arena = arrange(b.build(), unplanned_schedule(b.build()))
    assert (arena.nbytes, arena.live_bytes, arena.waste) == (0, 0, 0.0)


PAIR = Arena(
    blocks=(Block(nbytes=600, first_step=0, last_step=4), Block(nbytes=100, first_step=3, last_step=9)),
    offsets=(0, 1024),
    nbytes=1536,
    live_bytes=1536,
)


def test_the_checker_passes_blocks_that_only_meet_in_time_or_space():
    check_arena(PAIR)
    later = Block(nbytes=100, first_step=5, last_step=9)
    check_arena(replace(PAIR, blocks=(PAIR.blocks[0], later), offsets=(0, 0)))


@pytest.mark.parametrize(
    ("offsets", "says"),
    [((0, 512), "blocks 0 and 1 are both in use at step 3"), ((0, 100), "block 1 lies at"), ((1024, 0), "block 0 lies"),
     ((-512, 0), "block 0 lies")],
)  # fmt: skip
def test_the_checker_names_what_lies_on_another_or_outside(offsets, says):
    with pytest.raises(PlanError, match=says):
        check_arena(replace(PAIR, offsets=offsets))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(0, 4), st.integers(0, 9)), max_size=8))
def test_the_checker_says_what_comparing_all_pairs_says(rows):
    found = tuple(Block(nbytes=size, first_step=first, last_step=first + more) for size, first, more, _ in rows)
    offsets = tuple(row[3] for row in rows)
    clash = any(
        a.first_step <= b.last_step and b.first_step <= a.last_step and x < y + b.nbytes and y < x + a.nbytes
        for i, (a, x) in enumerate(zip(found, offsets, strict=True))
        for b, y in list(zip(found, offsets, strict=True))[:i]
    )
    arena = Arena(blocks=found, offsets=offsets, nbytes=99, live_bytes=1, alignment_bytes=1)
    if not clash:
        check_arena(arena)
        return
    with pytest.raises(PlanError, match="lie on one another"):
        check_arena(arena)
