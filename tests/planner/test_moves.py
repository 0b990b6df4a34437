"""Tensors moved to the host and back: exact bytes whatever the times, and the boundaries that a placement chooses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis import cannot_move, evictable, floor, movable
from planner.arena import arrange, check_arena
from planner.blocks import blocks
from planner.errors import LinkError, PlanError
from planner.explain import Choice, explain
from planner.host_link import HostLink, parse_link
from planner.incremental import Incremental
from planner.ir import Graph, Rerun, Timing
from planner.placement import Placement, place
from planner.plan import Eviction, Plan, Restore, recompute_once
from planner.plan_table import cells, plan_rows
from planner.schedule import COPY_IN, COPY_OUT, Free, Launch, Run, Schedule, Wait, lower
from planner.simulator import bytes_by_role, simulate
from planner.solve import Problem, Status, solve
from planner.synthetic import Network, chain, residual_tower
from planner.walk import Launched, Ran, Waited, walk
from tests.graphs import links, networks, networks_with_moves
from tests.reference import Execution, naive_bytes, naive_end_us, naive_host_bytes, unplanned
from tests.small import Says, block, op, read_twice, split, storage, storages

many = settings(max_examples=100, deadline=None)
LINK = HostLink.of(0.01, latency_us=1.0)  # 10 bytes a µs


def move(graph: Graph, name: str, after: str, gone: str, back: str, before: str) -> Eviction:
    """The move of a storage, all by name."""
    return Eviction(
        storage=storage(graph, name),
        free_after=op(graph, after),
        gone_before=op(graph, gone),
        back_before=op(graph, back),
        restore_before=op(graph, before),
        how=Restore.OFFLOAD,
    )


def drawn_plan(state: Incremental, moves) -> Plan:
    placed = Placement(moves=moves, stage_bytes=state.stage_bytes(), stall_us=0.0, recompute_us=0.0, stalls={})
    return placed.added_to(state.plan())


# -- properties ---------------------------------------------------------------------------------------------------


@many
@given(networks_with_moves(), links())
def test_a_schedule_with_moves_computes_the_terms_of_the_original(drawn, link):
    graph, state, moves = drawn
    expected = Execution(graph).run(unplanned(graph, in_place=state.in_place))
    schedule = lower(graph, drawn_plan(state, moves), in_place=state.in_place, link=link)
    actual = Execution(graph).run(schedule)
    assert actual.original == expected.original
    assert actual.version == expected.version
    assert all(terms == expected.original[op] for op, terms in actual.rerun_terms)
    assert [actual.terms[v] for v in graph.outputs] == [expected.terms[v] for v in graph.outputs]


@many
@given(networks_with_moves(), links())
def test_bytes_here_and_on_the_host_and_time_equal_the_naive_ones(drawn, link):
    graph, state, moves = drawn
    schedule = lower(graph, drawn_plan(state, moves), in_place=state.in_place, link=link)
    timeline, naive = simulate(graph, schedule), naive_bytes(graph, schedule)
    assert list(timeline.bytes_at) == naive
    assert timeline.peak_bytes == max(naive)
    assert timeline.host_peak_bytes == max(naive_host_bytes(graph, schedule))
    assert timeline.moved_bytes == sum(m.nbytes for m in moves)
    assert timeline.time_us == pytest.approx(naive_end_us(graph, schedule, link))
    assert timeline.base_us == pytest.approx(graph.time_us)
    assert timeline.recompute_us == pytest.approx(state.recompute_us)
    series = bytes_by_role(graph, schedule)
    assert [sum(column) for column in zip(*series.values(), strict=True)] == naive


@many
@given(networks_with_moves(), links(), links(), st.randoms(use_true_random=False))
def test_no_time_and_no_speed_changes_a_byte(drawn, link, other_link, random):
    graph, state, moves = drawn
    plan = drawn_plan(state, moves)
    times = tuple(op.time_us * random.uniform(0.3, 3.0) for op in graph.ops)
    slower = graph.with_times(times, timing=Timing())
    before = lower(graph, plan, in_place=state.in_place, link=link)
    after = lower(slower, plan, in_place=state.in_place, link=other_link)
    assert after.steps == before.steps
    assert simulate(slower, after).bytes_at == simulate(graph, before).bytes_at
    assert simulate(slower, after).host_peak_bytes == simulate(graph, before).host_peak_bytes


@many
@given(networks_with_moves(), links())
def test_the_stages_of_the_incremental_form_lose_exactly_what_is_away(drawn, link):
    graph, state, moves = drawn
    timeline = simulate(graph, lower(graph, drawn_plan(state, moves), in_place=state.in_place, link=link))
    expected = state.stage_bytes()
    for m in moves:
        expected[m.gone : m.back] -= m.nbytes
    assert timeline.peak_bytes == expected.max()


@many
@given(networks_with_moves(), links(), st.floats(0.3, 1.0), st.one_of(st.none(), st.integers(0, 150)))
def test_a_placement_is_what_the_judge_says_of_it(drawn, link, share, host_budget):
    graph, state, moves = drawn
    budget = int(share * state.peak()[0])
    wanted = [m.storage for m in moves]
    placed = place(state, wanted, budget_bytes=budget, link=link, host_budget_bytes=host_budget)
    timeline = simulate(graph, lower(graph, placed.added_to(state.plan()), in_place=state.in_place, link=link))
    assert placed.peak_bytes == timeline.peak_bytes
    assert placed.stall_us == pytest.approx(timeline.stall_us)
    assert placed.extra_us == pytest.approx(timeline.extra_us)
    assert placed.storages <= set(wanted)
    assert host_budget is None or timeline.host_peak_bytes <= host_budget


@many
@given(networks_with_moves(), links())
def test_no_schedule_with_moves_is_below_the_floor_for_them(drawn, link):
    graph, state, moves = drawn
    timeline = simulate(graph, lower(graph, drawn_plan(state, moves), in_place=state.in_place, link=link))
    assert floor(graph, in_place=state.in_place, moving=True).nbytes <= timeline.peak_bytes
    assert floor(graph, moving=True).nbytes <= floor(graph).nbytes


@many
@given(networks_with_moves(max_layers=6), links())
def test_what_comes_back_has_a_block_of_its_own_in_an_arena(drawn, link):
    graph, state, moves = drawn
    schedule = lower(graph, drawn_plan(state, moves), in_place=state.in_place, link=link)
    found = blocks(graph, schedule)
    for position, nbytes in enumerate(simulate(graph, schedule).bytes_at):
        taken = sum(b.nbytes for b in found if b.first_step <= position <= b.last_step)
        assert graph.start_bytes + taken == nbytes
    check_arena(arrange(graph, schedule))


@st.composite
def any_moves(draw, graph: Graph) -> Plan:
    """Moves of any storage between any ops."""
    evictions = []
    for s in graph.storages:
        if not draw(st.booleans()):
            continue
        places = sorted(draw(st.integers(0, len(graph.ops) - 1)) for _ in range(4))
        how = draw(st.sampled_from((Restore.OFFLOAD, Restore.OFFLOAD, Restore.RECOMPUTE)))
        gone, back = (places[1], places[2]) if how is Restore.OFFLOAD else (None, None)
        evictions.append(
            Eviction(
                storage=s.id,
                free_after=places[0],
                gone_before=gone,
                back_before=back,
                restore_before=places[3],
                how=how,
            )
        )
    return Plan(evictions=tuple(evictions))


@many
@given(networks(max_layers=6), st.data())
def test_any_moves_are_refused_by_name_or_carried_out_exactly(graph, data):
    plan = data.draw(any_moves(graph))
    try:
        schedule = lower(graph, plan, link=LINK)
    except PlanError as refusal:
        message, schedule = str(refusal), None
    if schedule is None:
        assert any(name in message for name in (*graph.storage_names, *(op.name for op in graph.ops)))
        return
    expected, actual = Execution(graph).run(unplanned(graph)), Execution(graph).run(schedule)
    assert actual.original == expected.original
    assert actual.version == expected.version
    assert list(simulate(graph, schedule).bytes_at) == naive_bytes(graph, schedule)


# -- by hand ------------------------------------------------------------------------------------------------------


def moved_twice_read() -> tuple[Graph, Plan]:
    graph = read_twice()
    return graph, Plan(evictions=(move(graph, "f", "g", "loss_bw", "g_bw", "g_bw"),))


def test_the_steps_of_a_move_stand_at_its_boundaries():
    graph, plan = moved_twice_read()
    text = lower(graph, plan, link=LINK).text(graph)
    assert text.startswith(
        block("""
        run f
        run g
          launch copy out f
        run loss
          wait for copy out f
          free f
        run loss_bw
        """)
    )
    assert "  launch copy in f\n  wait for copy in f\nrun g_bw" in text


def test_waits_cost_what_is_left_of_the_copy():
    graph, plan = moved_twice_read()
    events = list(walk(graph, lower(graph, plan, link=LINK)))
    out, back = [e for e in events if isinstance(e, Launched)]
    assert (out.start_us, out.done_us) == (7.0, 18.0)  # 1 µs, and 100 bytes at 10 a µs
    assert out.made == ()
    assert back.made == (storage(graph, "f"),)
    waited_out, waited_in = [e for e in events if isinstance(e, Waited)]
    assert waited_out.stall_us == 18.0 - 7.0 - graph.ops[op(graph, "loss")].time_us
    assert waited_in.stall_us == 11.0
    assert [e.op.name for e in events if isinstance(e, Ran)] == [o.name for o in graph.ops]


def test_two_copies_of_one_lane_wait_for_one_another():
    graph = chain(3)
    plan = Plan(
        evictions=tuple(
            Eviction(
                storage=storage(graph, name),
                free_after=op(graph, after),
                gone_before=op(graph, "loss"),
                back_before=op(graph, "loss_bw"),
                restore_before=op(graph, "loss_bw"),
                how=Restore.OFFLOAD,
            )
            for name, after in (("f0", "f1"), ("f1", "f2"))
        )
    )
    slow = HostLink.of(1e-6, latency_us=0.0)
    first, second = [
        e for e in walk(graph, lower(graph, plan, link=slow)) if isinstance(e, Launched) and e.step.lane == COPY_OUT
    ]
    assert second.busy_us == first.done_us > second.start_us


def test_what_may_never_be_recomputed_can_still_be_moved():
    net = Network("foreign")
    h = net.layer("foreign", [net.x], 100, rerun=Rerun.NEVER)
    graph = net.graph(net.layer("loss", [net.layer("wide", [h], 300)], 4))
    foreign = storage(graph, "foreign")
    assert foreign in movable(graph)
    assert foreign in evictable(graph, moving=True)
    assert foreign not in evictable(graph, moving=False)
    state = Incremental(graph)
    placed = place(state, [foreign], budget_bytes=1, link=LINK)
    assert placed.peak_bytes < state.peak()[0]
    told = explain(graph, placed.added_to(Plan()), lower(graph, placed.added_to(Plan()), link=LINK))[foreign]
    assert told.reason.endswith("cannot be recomputed")


def test_a_sibling_that_is_rerun_makes_what_is_away_for_a_moment():
    graph = split()
    state = Incremental(graph, storages(graph, "halve.1"))
    away = storage(graph, "halve.0")
    placed = place(state, [away], budget_bytes=0, link=LINK)
    if not placed.moves:
        pytest.fail("it has nowhere to go")
    schedule = lower(graph, placed.added_to(state.plan()), link=LINK)
    assert max(naive_bytes(graph, schedule)) == simulate(graph, schedule).peak_bytes == placed.peak_bytes


def test_a_plan_with_moves_needs_a_link():
    graph, plan = moved_twice_read()
    with pytest.raises(LinkError, match="moves 1 tensors to the host, 'f' first, and there is no link"):
        lower(graph, plan)
    with pytest.raises(LinkError, match="says no link"):
        simulate(graph, Schedule(lower(graph, plan, link=LINK).steps))


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"gone_before": None}, "a plan says before which op it is gone"),
        ({"restore_before": None}, "a plan says before which op it is gone"),
        ({"gone_before": 1}, "must follow one another"),
        ({"back_before": 2}, "must follow one another"),
        ({"how": Restore.RECOMPUTE}, "only what is moved to the host has boundaries"),
        ({"how": "offload"}, "how it comes back is a Restore"),
        ({"storage": 0}, "it is live before the step"),
        ({"gone_before": 2.5}, "whole numbers"),
    ],
)
def test_a_move_that_cannot_be_is_refused_with_the_reason(places, message):
    graph, plan = moved_twice_read()
    with pytest.raises(PlanError, match=message):
        lower(graph, Plan(evictions=(replace(plan.evictions[0], **places),)), link=LINK)


def test_reading_what_is_on_the_host_is_refused_by_name():
    graph = read_twice()
    with pytest.raises(PlanError, match="'f' is wanted before or by op 'g_bw', while it is on the host"):
        lower(graph, Plan(evictions=(move(graph, "f", "g", "loss", "f_bw", "f_bw"),)), link=LINK)


def test_a_schedule_that_misuses_a_lane_is_refused_where_it_does():
    graph = read_twice()
    f = storage(graph, "f")
    out, back = Launch(COPY_OUT, f), Launch(COPY_IN, f)
    wrong = {
        "'f' while it is being copied": (Run(0), out, Free(f)),
        "copies 'f' while it is being copied": (Run(0), out, out),
        "which is not there to be copied": (out,),
        "which is not on the host": (Run(0), Free(f), back),
        "which was not launched": (Run(0), Wait(COPY_OUT, f)),
        "runs 'g' while 'f' is still on its way back": (Run(0), out, Wait(COPY_OUT, f), Free(f), back, Run(1)),
    }
    for message, steps in wrong.items():
        with pytest.raises(PlanError, match=message):
            simulate(graph, Schedule(steps, LINK))


def test_a_plan_with_moves_comes_back_from_its_file(tmp_path):
    graph, plan = moved_twice_read()
    plan.save(tmp_path / "plan.json", graph)
    assert Plan.load(tmp_path / "plan.json", graph) == plan


def test_tables_and_reasons_name_the_move():
    graph, plan = moved_twice_read()
    (row,) = [r for r in plan_rows(graph, plan) if r.choice is Choice.OFFLOAD]
    assert cells(row) == ("f", "", "100", "OFFLOAD", "5.0", "g", "g_bw")
    told = {d.name: d for d in explain(graph, plan, lower(graph, plan, link=LINK))}["f"]
    assert told.reason == (
        "moved to the host: 100 B copied out after g, gone before loss_bw, on its way back before g_bw, back before "
        "g_bw, 5 µs to recompute"
    )
    assert told.live == (("f", "loss"), ("loss_bw", "f_bw"))


def test_a_solution_says_what_it_moves_and_how_long_it_waits():
    graph, plan = moved_twice_read()
    solution = solve(Problem(graph=graph, budget_bytes=10_000, host_link=LINK), Says(lambda _: plan))
    assert solution.status is Status.FITS
    assert solution.moved == (storage(graph, "f"),)
    assert "moves 1 to the host and back (100 B at 0.01 GB/s" in str(solution)
    assert solution.timeline.extra_us == solution.timeline.stall_us > 0


def test_more_on_the_host_than_it_may_hold_is_over_budget():
    graph, plan = moved_twice_read()
    problem = Problem(graph=graph, budget_bytes=10_000, host_link=LINK, host_budget_bytes=99)
    solution = solve(problem, Says(lambda _: plan))
    assert solution.status is Status.OVER_BUDGET
    assert solution.reason == "moves 100 B to the host, which may hold 99 B"


def test_where_there_is_no_gap_there_is_no_move():
    graph = residual_tower(2)
    state = Incremental(graph, movable(graph))
    plan = place(state, (), budget_bytes=1, link=LINK)
    assert plan.moves == ()
    assert plan.extra_us == state.recompute_us
    assert plan.added_to(state.plan()) == recompute_once(graph, movable(graph))


def test_inputs_outputs_and_empty_storages_stay():
    graph = residual_tower(1)
    assert cannot_move(graph, 0) == "it is live before the step"
    assert "outlives" in cannot_move(graph, storage(graph, "loss"))


# -- links --------------------------------------------------------------------------------------------------------


def test_a_link_is_stated_in_gigabytes_a_second():
    assert parse_link("24") == HostLink.of(24)
    assert parse_link("24/12") == HostLink(out_bytes_per_s=24e9, in_bytes_per_s=12e9)
    assert str(parse_link("24/12")) == "24 GB/s out and 12 GB/s in"
    assert HostLink.of(1, latency_us=2.0).out_us(3000) == 5.0


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "fast", "1/2/3", "24/0", ""])
def test_a_link_that_cannot_be_is_one_sentence(text):
    with pytest.raises(LinkError, match="host link"):
        parse_link(text)
